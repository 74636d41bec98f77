// Saves a drawn chart as a PNG on the page's own background. Charts, and this button, need script; the tables do not.
"use strict";
(() => {
  const buttons = [...document.querySelectorAll("[data-png]")];
  const save = async (button) => {
    const chart = document.getElementById(button.dataset.png);
    if (!window.Plotly || !chart?.data) return;
    const layout = { ...chart.layout, paper_bgcolor: getComputedStyle(document.documentElement).backgroundColor };
    // Plotly's own way to PNG goes through a blob, which the page's policy does not allow as an image; SVG data does.
    const size = { width: 1200, height: 600 };
    const picture = new Image();
    picture.src = await window.Plotly.toImage({ data: chart.data, layout }, { format: "svg", ...size });
    await picture.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * size.width, height: 2 * size.height });
    canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
    const link = document.createElement("a");
    link.href = canvas.toDataURL("image/png");
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
