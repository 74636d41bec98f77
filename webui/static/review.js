// Keys of the reviewer's pages: one key decides and goes on. Everything has a form beside it that needs no script.
"use strict";
(() => {
  const $ = (selector) => document.querySelector(selector);
  const findings = () => [...document.querySelectorAll("[data-finding]")];
  const state = $("#key-state");
  const say = (words) => { if (state) state.textContent = words; };
  const on = $("#keys")?.dataset.on !== "0";
  let choosing = false; // "r" was pressed: the next digit is the reason
  let at = -1; // the finding that was visited last

  const box = (finding) => finding.querySelector('input[name="seen"]');
  const dismissal = (finding) => finding.querySelector('input[name^="dismiss-"]');

  // Approval unlocks once every finding was looked at. The server asks again.
  const refresh = () => {
    const unseen = findings().filter((f) => box(f) && !box(f).checked);
    const count = $("#unseen");
    if (count) count.textContent = unseen.length;
    const approve = $("#approve");
    if (approve) approve.disabled = unseen.length > 0;
    return unseen;
  };

  const visit = (finding) => {
    at = findings().indexOf(finding);
    for (const mark of document.querySelectorAll("mark.here")) mark.classList.remove("here");
    for (const mark of document.querySelectorAll("mark[data-findings]"))
      if (mark.dataset.findings.split(" ").includes(finding.dataset.finding)) mark.classList.add("here");
    finding.focus({ preventScroll: true });
    finding.scrollIntoView({ block: "center" });
    if (box(finding)) box(finding).checked = true;
    const left = refresh().length;
    say(`Finding ${finding.dataset.finding} of ${findings().length}. ${left ? `${left} not looked at yet.` : "All were looked at."}`);
  };

  const nextFinding = () => {
    const all = findings();
    if (!all.length) { say("The rules found nothing here."); return; }
    visit(all[(at + 1) % all.length]);
  };

  const approve = () => {
    const button = $("#approve");
    if (!button) { say("A hard finding cannot be approved; edit the runbook, or reject it."); return; }
    const unseen = refresh();
    if (unseen.length) { visit(unseen[0]); say(`${unseen.length} findings to look at first.`); return; }
    const open = findings().find((f) => dismissal(f) && !dismissal(f).value.trim());
    if (open && !$("#reason").value.trim()) {
      dismissal(open).focus();
      say("Say why this finding may stay, then press Enter.");
      return;
    }
    button.form.requestSubmit(button);
  };

  const reject = (digit) => {
    const choice = $(`input[name="number"][value="${digit}"]`);
    if (!choice) return;
    choice.checked = true;
    if (digit === "9" && !$("#reason").value.trim()) {
      $("#reason").focus();
      say("Write the reason, then choose Reject.");
      return;
    }
    $("#reject").form.requestSubmit($("#reject"));
  };

  const follow = (selector) => $(selector)?.click();
  const submit = (key) => {
    const form = $(`form[data-key="${key}"]`);
    if (form) form.requestSubmit();
  };

  const actions = {
    j: () => follow("[data-next]"),
    k: () => follow("[data-previous]"),
    e: nextFinding,
    a: approve,
    r: () => { if ($("#reject")) { choosing = true; say("Reject: 1 to 9 chooses the reason, Escape leaves it."); } },
    s: () => submit("s"),
    u: () => submit("u"),
    c: () => $("#comment")?.focus(),
    "?": () => { const help = $("#help"); if (help) { help.open = true; help.scrollIntoView({ block: "nearest" }); help.querySelector("summary").focus(); } },
  };

  document.addEventListener("keydown", (event) => {
    if (!on || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const field = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (field) {
      if (event.key === "Escape") field.blur();
      if (event.key === "Enter" && field.name?.startsWith("dismiss-")) { event.preventDefault(); field.blur(); approve(); }
      if (!["checkbox", "radio"].includes(field.type)) return;
    }
    if (choosing) {
      choosing = false;
      if (/^[1-9]$/.test(event.key)) { event.preventDefault(); reject(event.key); return; }
      say("");
      if (event.key === "Escape") return;
    }
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });

  const start = () => {
    // The list is not replaced under somebody's ticks: it says that it is old.
    document.getElementById("live")?.addEventListener("rsi-reviews", () => { const news = $("#news"); if (news) news.hidden = false; });
    for (const finding of findings()) box(finding)?.addEventListener("change", refresh);
    refresh();
    if (location.hash.startsWith("#finding-")) { const f = $(location.hash); if (f?.dataset.finding) visit(f); }
    for (const link of document.querySelectorAll('a[href^="#finding-"]'))
      link.addEventListener("click", () => { const f = document.getElementById(link.hash.slice(1)); if (f) visit(f); });
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
