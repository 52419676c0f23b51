"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const place = document.getElementById("explorer-plot");
  const [across, up, by] = ["across", "up", "by"].map((id) => document.getElementById(`explorer-${id}`));
  const options = (select, texts) => Object.entries(texts).forEach(([value, text]) => select.add(new Option(text, value)));
  options(across, data.labels);
  options(up, data.labels);
  options(by, Object.fromEntries(Object.keys(data.groups).map((name) => [name, name.replaceAll("_", " ")])));
  [across.value, up.value] = data.first;

  // The library is kept compressed in the page and unpacked on the first use only.
  async function unpack() {
    const packed = document.getElementById("explorer-code").textContent.trim();
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  function draw() {
    const theme = getComputedStyle(document.documentElement);
    const [ink, grid, paper] = ["--ink", "--grid", "--paper"].map((name) => theme.getPropertyValue(name).trim());
    const choices = data.groups[by.value];
    const traces = [...new Set(choices)].map((choice) => {
      const rows = choices.map((own, row) => (own === choice ? row : -1)).filter((row) => row >= 0);
      const pick = (column) => rows.map((row) => data.numbers[column][row]);
      return {
        type: "scatter", mode: "markers", name: choice,
        x: pick(across.value), y: pick(up.value), text: rows.map((row) => data.names[row]),
        hovertemplate: "%{text}<br>%{x:.4~g}, %{y:.4~g}<extra></extra>",
        marker: { size: 10, color: data.colours[by.value][choice], line: { width: 1, color: paper } },
      };
    });
    const axis = (column) => ({ title: { text: data.labels[column] }, gridcolor: grid, zeroline: false, rangemode: "tozero" });
    const layout = {
      paper_bgcolor: paper, plot_bgcolor: paper, font: { color: ink, family: "inherit" }, height: 460,
      margin: { l: 70, r: 20, t: 20, b: 60 }, showlegend: true,
      xaxis: axis(across.value), yaxis: axis(up.value),
    };
    window.Plotly.react(place, traces, layout, { displaylogo: false, responsive: true });
  }

  let ready = null;
  const show = () => (ready ??= unpack()).then(draw);
  document.getElementById("explorer").addEventListener("toggle", (event) => event.target.open && show());
  [across, up, by].forEach((select) => select.addEventListener("change", show));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => ready && show());
})();
