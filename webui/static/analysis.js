// Saves a drawn chart as a PNG on the page's own background. Charts, and this button, need script; the tables do not.
"use strict";
(() => {
  const buttons = [...document.querySelectorAll("[data-png]")];
  const save = async (button) => {
    const chart = document.getElementById(button.dataset.png);
    if (!window.Plotly || !chart?.data) return;
    const layout = { ...chart.layout, paper_bgcolor: getComputedStyle(document.documentElement).backgroundColor };
    const url = await window.Plotly.toImage({ data: chart.data, layout }, { format: "png", width: 1200, height: 600, scale: 2 });
    const link = document.createElement("a");
    link.href = url;
    link.download = `${button.dataset.name}.png`;
    document.body.append(link);
    link.click();
    link.remove();
  };
  for (const button of buttons) {
    button.parentElement.hidden = false;
    button.addEventListener("click", () => save(button).catch((error) => console.warn(`PNG: ${error.message}`)));
  }
})();
