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
  let moving = false;
  const others = (one, act) => {
    if (moving) return;
    moving = true;
    try { for (const chart of charts()) if (chart !== one) act(chart); } finally { moving = false; }
  };
  const join = (chart) => {
    chart.on("plotly_hover", (event) => {
      const at = event.points[0].x;
      others(chart, (other) => {
        const points = other.data.flatMap((trace, curve) => {
          const index = trace.hoverinfo === "skip" ? -1 : trace.x.indexOf(at);
          return index < 0 || trace.y[index] == null ? [] : [{ curveNumber: curve, pointNumber: index }];
        });
        if (points.length) window.Plotly.Fx.hover(other, points);
        else window.Plotly.Fx.unhover(other);
      });
    });
    chart.on("plotly_unhover", () => others(chart, (other) => window.Plotly.Fx.unhover(other)));
    chart.on("plotly_relayout", (change) => {
      const zoom = {};
      for (const key of ["xaxis.range[0]", "xaxis.range[1]", "xaxis.autorange"]) if (key in change) zoom[key] = change[key];
      if (Object.keys(zoom).length) others(chart, (other) => window.Plotly.relayout(other, zoom));
    });
  };
  const seen = new WeakSet();
  new MutationObserver(() => {
    for (const chart of charts()) if (!seen.has(chart)) { seen.add(chart); join(chart); }
  }).observe(document.documentElement, { subtree: true, attributes: true, attributeFilter: ["class"] });
})();
