// What the pages do beyond reading: charts, a log tail that never grabs the scroll, remembered folds, "/" to jump.
// Everything is readable without this file.
"use strict";
(() => {
  const plotlyUrl = document.currentScript.dataset.plotly;
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // ---------------------------------------------------------------- a narrow screen's rail and tabs show where one is
  for (const here of $$(".rail nav [aria-current], .tabs [aria-current]")) {
    const nav = here.closest("nav");
    nav.scrollLeft = here.offsetLeft - nav.offsetLeft - (nav.clientWidth - here.offsetWidth) / 2;
  }

  // ---------------------------------------------------------------- charts: fetch JSON, Plotly.react, keep the zoom
  let plotly = null;
  const loadPlotly = () =>
    (plotly ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = plotlyUrl;
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => reject(new Error("the chart library did not load"));
      document.head.append(script);
    }));

  const colour = (name) => {
    const probe = document.createElement("i"); // resolves light-dark() to the colour in force
    probe.className = "visually-hidden";
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  };

  const themed = (layout) => {
    const ink = colour("--ink"), rule = colour("--rule"), quiet = colour("--quiet");
    const axis = (a) => ({ ...a, gridcolor: rule, linecolor: rule, zerolinecolor: rule, tickfont: { color: quiet, size: 11 }, title: { ...a?.title, font: { color: quiet, size: 12 } } });
    return {
      ...layout,
      font: { family: getComputedStyle(document.body).fontFamily, color: ink, size: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: colour("--sheet"), bordercolor: rule, font: { color: ink } },
      ...Object.fromEntries(Object.keys(layout).filter((key) => /^[xy]axis/.test(key)).map((key) => [key, axis(layout[key])])),
    };
  };

  // `element.zoom`: a range that came from another chart (see lead.js), which Plotly itself would forget at the next update.
  const layoutOf = (element) => {
    const { layout } = element.figure;
    const range = element.zoom ?? layout.xaxis?.range;
    return themed(range ? { ...layout, xaxis: { ...layout.xaxis, range: [...range] } } : layout); // Plotly writes into it
  };

  const drawChart = async (element) => {
    if (element.dataset.busy) { element.dataset.again = "1"; return; }
    element.dataset.busy = "1";
    try {
      const answer = await fetch(element.dataset.src, { headers: { Accept: "application/json" } });
      if (!answer.ok) throw new Error(`chart: ${answer.status}`);
      const figure = await answer.json();
      if (!figure.data.length) return;
      const Plotly = await loadPlotly();
      element.figure = figure;
      // The page's policy allows no inline style element, so no mode bar; double click resets the zoom.
      await Plotly.react(element, figure.data, layoutOf(element), { responsive: true, displayModeBar: false });
    } catch (error) {
      console.warn(error.message); // the table behind the chart stays readable
    } finally {
      delete element.dataset.busy;
      if (element.dataset.again) { delete element.dataset.again; setTimeout(() => drawChart(element), 1000); }
    }
  };

  const startCharts = () => {
    const live = document.getElementById("live");
    for (const element of $$(".chart[data-src]")) {
      drawChart(element);
      let waiting = 0;
      for (const name of (element.dataset.wake || "").split(" ").filter(Boolean)) {
        live?.addEventListener(name, () => {
          clearTimeout(waiting);
          waiting = setTimeout(() => drawChart(element), 800);
        });
      }
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      for (const element of $$(".chart")) if (element.figure) window.Plotly.react(element, element.figure.data, layoutOf(element), { responsive: true, displayModeBar: false });
    });
  };

  // -------------------------------------------------- log tail: follows only a reader who is at its end; 1,000 lines
  const startLog = () => {
    const log = document.getElementById("log-lines");
    if (!log) return;
    log.scrollTop = log.scrollHeight;
    let atEnd = true;
    log.addEventListener("scroll", () => { atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 24; }, { passive: true });
    new MutationObserver(() => {
      if (!atEnd) return;
      while (log.children.length > 1000) log.firstElementChild.remove();
      log.scrollTop = log.scrollHeight;
    }).observe(log, { childList: true });
  };

  // ------------------------------------------------------------------------------------ folds keep what was opened
  const startFolds = () => {
    const holder = document.querySelector("[data-folds]");
    if (!holder) return;
    const key = `folds:${holder.dataset.folds}`;
    const read = () => { try { return JSON.parse(localStorage.getItem(key) || "{}"); } catch { return {}; } };
    const known = read();
    for (const fold of $$("details[data-fold]")) {
      const name = fold.dataset.fold;
      if (name in known) fold.open = known[name];
      fold.addEventListener("toggle", () => {
        const now = read();
        now[name] = fold.open;
        try { localStorage.setItem(key, JSON.stringify(now)); } catch { /* storage is full or off: folds are not kept */ }
      });
    }
    const target = location.hash && document.getElementById(location.hash.slice(1));
    const turn = Number(/^#t(\d+)$/.exec(location.hash)?.[1] ?? NaN);
    if (!target && turn < Number(holder.dataset.turns)) { location.replace(`${location.pathname}?turn=${turn}`); return; }
    if (target) { // opened folds have moved it, and turns are laid out only when they come into view: go there twice
      requestAnimationFrame(() => { target.scrollIntoView(); setTimeout(() => target.scrollIntoView(), 120); });
    }
  };

  // --------------------------------------------------------------------------------------------------- ages, keys
  const units = [[86400, "d"], [3600, "h"], [60, "m"]];
  const renewAges = () => {
    for (const time of $$("time[data-age]")) {
      const seconds = Math.max(0, Math.floor((Date.now() - Date.parse(time.dateTime)) / 1000));
      const [size, unit] = units.find(([s]) => seconds >= s) || [1, "s"];
      time.textContent = `${Math.floor(seconds / size)} ${unit} ago`;
    }
  };

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      document.getElementById("jump")?.focus();
    }
  });

  // After a reconnect every live part reads itself again: what was missed is on the page, not only what comes next.
  let connections = 0;
  document.addEventListener("htmx:sse:after:connection", () => {
    if (connections++ > 0) document.getElementById("live")?.dispatchEvent(new CustomEvent("rsi-reconnect"));
  });

  const start = () => { startCharts(); startLog(); startFolds(); renewAges(); setInterval(renewAges, 15000); };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
