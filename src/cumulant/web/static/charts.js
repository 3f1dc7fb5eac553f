// Charts with plotly, loaded from this machine when a view first needs them; tables beside them hold the same numbers.
import { MECHANISMS, SPARE } from "./colour.js";
import { byId, element } from "./dom.js";

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MARKERS = ["circle", "square", "diamond", "triangle-up", "x", "cross"];
let loading = null;
let available = true;
let remedy = "";

export const haveCharts = (there, install) => { available = there; remedy = install; };
/** The colour of a model's mechanism; of several models with one mechanism the first has it. */
export function colourOf(models, i) {
  const name = models[i].attention, first = models.findIndex((one) => one.attention === name) === i;
  return (first && MECHANISMS[name]) || SPARE[i % SPARE.length];
}
export const dashOf = (i) => DASHES[i % DASHES.length];
export const markerOf = (i) => MARKERS[i % MARKERS.length];

function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "/vendor/plotly.min.js", onload: () => resolve(window.Plotly) });
    script.onerror = () => { loading = null; reject(new Error("plotly")); };
    document.head.append(script);
  });
  return loading;
}

const waiting = new WeakMap();

/** A figure with a chart of these traces, drawn by `drawCharts`; a sentence where plotly is not installed. */
export function chart(title, traces, layout) {
  if (!available) return element("p", { class: "hint" }, `${title}: charts need plotly (${remedy}); the table below holds the numbers.`);
  const place = element("div", { class: "chart", role: "img", "aria-label": `${title}; the same numbers are in the table below` });
  waiting.set(place, { traces, layout });
  return element("figure", { class: "card figure" }, element("h3", {}, title), place);
}

/** Draw the charts of an element that is on the page. */
export async function drawCharts(view) {
  const places = [...view.querySelectorAll(".chart")];
  if (!places.length) return;
  const plotly = await load().catch(() => null);
  for (const place of places) {
    if (!place.isConnected) continue;
    if (plotly) await draw(plotly, place);
    else place.replaceWith(element("p", { class: "hint" }, "The chart could not be loaded; the table below holds the numbers."));
  }
}

async function draw(plotly, place) {
  const { traces, layout } = waiting.get(place);
  const grid = getComputedStyle(byId("legend-bar")).borderTopColor, ink = getComputedStyle(place).color;
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true, tickcolor: grid };
  const titled = (given) => ({ ...axis, ...given, title: { ...given.title, font: { size: 13 }, standoff: 8 } });
  await plotly.newPlot(place, traces, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 320, hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    margin: { l: 50, r: 12, t: 8, b: 40 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    ...layout, xaxis: titled(layout.xaxis), yaxis: titled(layout.yaxis),
  }, { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  place.dataset.drawn = "true";
}

/** Every chart of an element as a PNG. */
export const pictures = async (place) => {
  const plotly = await load();
  return Promise.all([...place.querySelectorAll(".chart")].map(async (one) =>
    (await fetch(await plotly.toImage(one, { format: "png", scale: 2, width: one.clientWidth, height: 320 }))).blob()));
};

/** A dashed line over the whole width at a value, with a word beside it. */
export const reference = (y, text) => ({
  shapes: [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { width: 1.5, dash: "dash", color: "#888" } }],
  annotations: [{ xref: "paper", x: 1, y, text, showarrow: false, xanchor: "right", yanchor: "bottom", font: { size: 12 } }],
});
