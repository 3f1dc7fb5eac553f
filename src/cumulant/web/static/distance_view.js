// Distance: how far every head looks, layer by layer, and how weight falls with distance in one layer.
import { ask } from "./api.js";
import { chart, colourOf, dashOf, markerOf, reference } from "./charts.js";
import { element } from "./dom.js";
import { LOOKS } from "./maps_view.js";
import { state } from "./state.js";

export async function distanceView(models) {
  const answers = await Promise.all(models.map((model) => ask("summary", { model: model.name, image: state.image, off: [] })));
  const distances = answers.map((answer) => answer.metrics.find((metric) => metric.name === "distance"));
  const layers = models.map((model) => Math.min(state.layer, model.layers - 1));
  const rings = answers.map((answer, i) => answer.profile[layers[i]]);
  const about = element("p", {}, "Distance is counted in hops: 1 is a neighbouring patch, also across a corner; each weight counts by its size. " +
    "A map that is the same everywhere looks as far as the dashed line says: heads below it look nearby. Hover to read a head, drag to zoom, double click to return.");
  return {
    node: element("div", {}, element("div", { class: "toolbar" }, about),
      element("div", { class: "panels wide" },
        byLayer(models, distances),
        profile(models, rings, layers)),
      element("div", { class: "panels wide" }, layerTable(models, distances), ringTable(models, rings))),
    data: models.map((model, i) => ({ model: model.name, distance: distances[i].values, uniform: distances[i].reference, profile: answers[i].profile })),
  };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function byLayer(models, distances) {
  const traces = models.flatMap((model, i) => {
    const shift = (i - (models.length - 1) / 2) * 0.12;
    const dots = distances[i].values.flatMap((layer, l) => layer.map((value, h) => [l + 1 + shift, value, `${model.name}, layer ${l + 1}, head ${h + 1}`]));
    return [
      { x: dots.map((d) => d[0]), y: dots.map((d) => d[1]), text: dots.map((d) => d[2]), mode: "markers", name: model.name, legendgroup: model.name,
        showlegend: false, marker: { color: colourOf(models, i), symbol: markerOf(i), size: 8, opacity: 0.65 }, hovertemplate: "%{text}: %{y:.2f} hops<extra></extra>" },
      { x: distances[i].values.map((_, l) => l + 1 + shift), y: distances[i].values.map(mean), mode: "lines", name: model.name, legendgroup: model.name,
        line: { color: colourOf(models, i), dash: dashOf(i), width: 2.5 }, hovertemplate: `${model.name}, mean of layer: %{y:.2f} hops<extra></extra>` },
    ];
  });
  const depth = Math.max(...models.map((model) => model.layers));
  return chart("Mean distance of every head (line: mean of the layer)", traces, {
    xaxis: { title: { text: "layer" }, tickvals: [...Array(depth).keys()].map((l) => l + 1) },
    yaxis: { title: { text: "mean distance, hops" } }, ...reference(distances[0].reference, "uniform"),
  });
}

function profile(models, rings, layers) {
  const traces = models.flatMap((model, i) => {
    const hops = rings[i][0].map((_, k) => k);
    const heads = rings[i].map((ring, h) => ({
      x: hops, y: ring, mode: "lines", name: model.name, legendgroup: model.name, showlegend: false, opacity: 0.35,
      line: { color: colourOf(models, i), dash: dashOf(i), width: 1 }, hovertemplate: `${model.name}, head ${h + 1}: %{y:.2f} at %{x} hops<extra></extra>`,
    }));
    return [...heads, {
      x: hops, y: hops.map((k) => mean(rings[i].map((ring) => ring[k]))), mode: "lines+markers", name: model.name, legendgroup: model.name,
      line: { color: colourOf(models, i), dash: dashOf(i), width: 2.5 }, marker: { symbol: markerOf(i), size: 7 }, hovertemplate: `${model.name}, mean of heads: %{y:.2f} at %{x} hops<extra></extra>`,
    }];
  });
  const looks = models[0].times > 1 ? LOOKS[models[0].axes[layers[0]]] : "";
  const most = Math.max(...rings.map((one) => one[0].length)) - 1;
  const hops = { range: [-0.5, most + 0.5], tick0: 0, dtick: Math.ceil((most + 1) / 10), tickangle: 0 };
  return chart(`Weight per neighbour in layer ${state.layer + 1}${looks} (bold: mean of heads)`, traces, {
    xaxis: { title: { text: "distance, hops" }, ...hops }, yaxis: { title: { text: "weight × tokens" } }, ...reference(1, "uniform"),
  });
}

function tableOf(title, columns, rows) {
  const head = element("tr", {}, ...columns.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map(([first, ...others]) => element("tr", {}, element("th", { scope: "row" }, first), ...others.map((text) => element("td", {}, text))));
  return element("section", { class: "card" }, element("h3", {}, title), element("div", { class: "scroll" },
    element("table", { class: "numbers" }, element("caption", { class: "visually-hidden" }, title), element("thead", {}, head), element("tbody", {}, ...body))));
}

function layerTable(models, distances) {
  const depth = Math.max(...models.map((model) => model.layers));
  const cell = (values) => values ? element("span", {}, mean(values).toFixed(2), element("small", {}, `${Math.min(...values).toFixed(2)} to ${Math.max(...values).toFixed(2)}`)) : "";
  const rows = [...Array(depth).keys()].map((l) => [`${l + 1}`, ...distances.map((one) => cell(one.values[l]))]);
  return tableOf("Mean distance of a layer, and of its nearest and farthest head", ["layer", ...models.map((model) => model.name)],
    [...rows, ["uniform", ...distances.map((one) => one.reference.toFixed(2))]]);
}

function ringTable(models, rings) {
  const hops = Math.max(...rings.map((one) => one[0].length));
  const cell = (one, k) => (k < one[0].length ? mean(one.map((ring) => ring[k])).toFixed(2) : "");
  const rows = [...Array(hops).keys()].map((k) => [`${k}`, ...rings.map((one) => cell(one, k))]);
  return tableOf(`Weight per neighbour in layer ${state.layer + 1}, times tokens`, ["hops", ...models.map((model) => model.name)], rows);
}
