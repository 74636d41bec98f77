// The launch form sends once; the charts of a stage share one crosshair and one zoom. Everything works without this file.
"use strict";
(() => {
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.matches("[data-once]") || event.submitter?.formAction?.endsWith("/check")) return;
    if (form.dataset.sent) { event.preventDefault(); return; }
    form.dataset.sent = "1";
  });
  addEventListener("pageshow", () => { for (const form of document.querySelectorAll("[data-once]")) delete form.dataset.sent; });

  // A link to a field opens the group that it is folded into.
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = target?.closest("details");
    if (fold) { fold.open = true; target.scrollIntoView({ block: "center" }); target.focus?.(); }
  };
  addEventListener("hashchange", open);
  addEventListener("load", open);

  // ------------------------------------------------------------------------ one crosshair and one zoom for all charts
  const charts = () => [...document.querySelectorAll(".chart[data-sync].js-plotly-plot")];
  const others = (one) => charts().filter((chart) => chart !== one);
  // What this file does to the other charts is reported by them as well, and later: only what a pointer did is passed on,
  // and a zoom only to charts that do not have it yet.
  const ofPointer = (event) => event.event instanceof Event;
  const zoomed = (chart, low, high) => {
    const [from, to] = chart._fullLayout.xaxis.range;
    const near = (high - low) / 1e6;
    return Math.abs(from - low) <= near && Math.abs(to - high) <= near;
  };
  const join = (chart) => {
    chart.on("plotly_hover", (event) => {
      if (!ofPointer(event)) return;
      const at = event.points[0].x;
      for (const other of others(chart)) {
        const points = other.data.flatMap((trace, curve) => {
          const index = trace.hoverinfo === "skip" ? -1 : trace.x.indexOf(at);
          return index < 0 || trace.y[index] == null ? [] : [{ curveNumber: curve, pointNumber: index }];
        });
        if (points.length) window.Plotly.Fx.hover(other, points);
        else window.Plotly.Fx.unhover(other);
      }
    });
    chart.on("plotly_unhover", (event) => {
      if (ofPointer(event)) for (const other of others(chart)) window.Plotly.Fx.unhover(other);
    });
    chart.on("plotly_relayout", (change) => {
      if (!Object.keys(change).some((key) => key.startsWith("xaxis."))) return;
      const [low, high] = chart._fullLayout.xaxis.range;
      const [first, last] = chart.figure.layout.xaxis.range;
      const whole = low <= first && high >= last; // a double click has reset it
      chart.zoom = whole ? null : [low, high];
      for (const other of others(chart)) {
        other.zoom = chart.zoom;
        if (!zoomed(other, low, high)) window.Plotly.relayout(other, { "xaxis.range[0]": low, "xaxis.range[1]": high });
      }
    });
  };
  const seen = new WeakSet();
  new MutationObserver(() => {
    for (const chart of charts()) if (!seen.has(chart)) { seen.add(chart); join(chart); }
  }).observe(document.documentElement, { subtree: true, attributes: true, attributeFilter: ["class"] });
})();
