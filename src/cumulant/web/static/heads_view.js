// Head summary: one number per head, as a table of buttons that switch heads off.
import { ask } from "./api.js";
import { chart, colourOf, dashOf, markerOf } from "./charts.js";
import { css, inkOn, sequential } from "./colour.js";
import { byId, element } from "./dom.js";
import { title } from "./maps_view.js";
import { isOff, set, state, switchHeads } from "./state.js";

const IMPORTANCE = {
  importance: { title: "importance: change of the answer", meaning: "Jensen-Shannon divergence between the answer with all heads and the answer without this one; 0 is no change, 0.69 the most there is.", key: "divergence" },
  drop: { title: "importance: loss of the predicted class", meaning: "By how much the probability of the predicted class falls without this head; below 0 it rises.", key: "drop" },
  feature: { title: "importance: change of the features", meaning: "1 - cosine between the features before the classifier with all heads and without this one.", key: "feature" },
};
const classless = (models) => models.some((model) => !model.classes);

export async function headsView(models, wanted, chosen) {
  const images = state.over === "many" && chosen.length ? chosen : [state.image];
  const summaries = await Promise.all(models.map((model) => summaryOf(model, images, wanted)));
  const known = summaries[0].metrics;
  const name = classless(models) && ["importance", "drop"].includes(state.metric) ? "feature" : state.metric; // no answer that could change
  const measure = IMPORTANCE[name] ?? known.find((metric) => metric.name === name) ?? IMPORTANCE.importance;
  const tables = [];
  for (const [i, model] of models.entries()) tables.push(await valuesOf(model, images, summaries[i], measure, wanted));
  const all = tables.flat(2);
  const [low, high] = [Math.min(0, ...all), Math.max(...all, 1e-9)];
  const panels = models.map((model, i) => panel(model, tables[i], low, high, measure));
  const parts = await partsOf(models, wanted);
  return {
    node: element("div", {}, toolbar(models, known, measure, chosen.length), element("div", { class: "panels" }, ranking(models, tables, measure), byLayer(models, tables, measure)),
      element("div", { class: models.some((model) => model.heads > 8) ? "panels full" : "panels wide" }, ...panels), parts),
    data: models.map((model, i) => ({ model: model.name, metric: measure.title, images, values: tables[i], summary: summaries[i].metrics })),
  };
}

const mean = (grids) => grids[0].map((layer, l) => layer.map((_, h) => grids.reduce((sum, grid) => sum + grid[l][h], 0) / grids.length));

/** The metrics of one picture, or their means over several. */
async function summaryOf(model, images, wanted) {
  const answers = [];
  for (const image of images) if (wanted() || !answers.length) answers.push(await ask("summary", { model: model.name, image, off: [] }));
  return { metrics: answers[0].metrics.map((metric, i) => ({ ...metric, values: mean(answers.map((answer) => answer.metrics[i]?.values ?? metric.values)) })) };
}

/** Layers by heads; importance is asked layer by layer, so that no answer takes long, and only as long as it is wanted. */
async function valuesOf(model, images, summary, measure, wanted) {
  if (!measure.key) return summary.metrics.find((metric) => metric.name === measure.name)?.values ?? [];
  const grids = [], long = images.length * model.layers * model.heads > 60;
  for (const [i, image] of images.entries()) {
    const answers = [];
    for (let layer = 0; layer < model.layers; layer++) {
      if (!wanted()) return Array(model.layers).fill(Array(model.heads).fill(0)); // nobody looks at it
      if (long) byId("status").textContent = `${model.name}: switching off the heads of layer ${layer + 1} of ${model.layers}, one by one${images.length > 1 ? `, picture ${i + 1} of ${images.length}` : ""} …`;
      answers.push(await ask("importance", { model: model.name, image, layer, off: [] }));
    }
    grids.push(answers.map((answer) => answer[measure.key] ?? answer.feature.map(() => 0)));
  }
  if (long) byId("status").textContent = "";
  return mean(grids);
}

/** Strength by layer: every head a dot, the mean a line. */
function byLayer(models, tables, measure) {
  const traces = models.flatMap((model, i) => [
    { x: tables[i].flatMap((layer, l) => layer.map(() => l + 1)), y: tables[i].flat(), mode: "markers", showlegend: false, marker: { color: colourOf(models, i), symbol: markerOf(i), opacity: 0.5 }, hovertemplate: `${model.name}, layer %{x}: %{y:.3g}<extra></extra>` },
    { x: tables[i].map((_, l) => l + 1), y: tables[i].map((layer) => layer.reduce((a, b) => a + b, 0) / layer.length), name: model.name, mode: "lines", line: { color: colourOf(models, i), dash: dashOf(i), width: 2 }, hovertemplate: `${model.name}, layer %{x}, mean: %{y:.3g}<extra></extra>` }]);
  return chart("By layer: heads and their mean", traces, { xaxis: { title: { text: "layer" }, dtick: 1 }, yaxis: { title: { text: measure.title.replace(/^importance: /, "") }, rangemode: "tozero" } });
}

/** Which part of the chosen head's map carries what it does. */
async function partsOf(models, wanted) {
  const made = [];
  for (const model of models) {
    if (!wanted() || state.layer >= model.layers || state.head >= model.heads || model.times > 1) continue;
    const answer = await ask("parts", { model: model.name, image: state.image, layer: state.layer, head: state.head, off: [] }).catch(() => null);
    if (answer) made.push({ model, parts: answer.parts });
  }
  if (!made.length) return null;
  const names = [...new Set(made.flatMap((one) => one.parts.map((part) => part.name)))];
  const cellOf = (one, name) => one.parts.find((part) => part.name === name)?.change;
  const table = element("table", { class: "numbers" }, element("caption", { class: "visually-hidden" }, "Change of the answer without a part of the map"),
    element("thead", {}, element("tr", {}, element("th"), ...made.map((one) => element("th", { scope: "col" }, one.model.name)))),
    element("tbody", {}, ...names.map((name) => element("tr", {}, element("th", { scope: "row" }, name), ...made.map((one) => element("td", {}, cellOf(one, name) === undefined ? "–" : short(cellOf(one, name))))))));
  return element("section", { class: "card figure", id: "parts" }, element("h3", {}, `Layer ${state.layer + 1}, head ${state.head + 1}: without a part of its map the answer changes by`), element("div", { class: "scroll" }, table));
}

/** All heads of every model by falling value: how much rests on few of them. */
function ranking(models, tables, chosen) {
  const traces = models.map((model, i) => {
    const heads = tables[i].flatMap((layer, l) => layer.map((value, h) => ({ value, name: `${model.name}, layer ${l + 1}, head ${h + 1}` })));
    heads.sort((a, b) => b.value - a.value);
    return {
      x: heads.map((_, rank) => rank + 1), y: heads.map((one) => one.value), text: heads.map((one) => one.name), name: model.name, mode: "lines+markers",
      line: { color: colourOf(models, i), dash: dashOf(i), width: 2 }, marker: { symbol: markerOf(i), size: 8 }, hovertemplate: "%{text}: %{y:.3g}<extra></extra>",
    };
  });
  return chart(`Heads by ${chosen.title.replace(/^importance: /, "importance, ")}`, traces, { xaxis: { title: { text: "rank of the head" } }, yaxis: { title: { text: chosen.title.replace(/^importance: /, "") }, rangemode: "tozero" } });
}

function toolbar(models, known, chosen, count) {
  const kinds = Object.entries(IMPORTANCE).filter(([name]) => name === "feature" || !classless(models));
  const options = [...kinds.map(([name, one]) => [name, one.title]), ...known.map((one) => [one.name, one.title])];
  const select = element("select", { id: "metric", onchange: () => set({ metric: select.value }) },
    ...options.map(([value, text]) => element("option", { value, selected: text === chosen.title }, text)));
  const reference = typeof chosen.reference === "number" ? ` A map that is the same everywhere has ${chosen.reference.toFixed(2)}.` : "";
  const over = element("select", { id: "over", onchange: () => set({ over: over.value }) },
    element("option", { value: "one", selected: state.over === "one" }, "this picture"), element("option", { value: "many", selected: state.over === "many" }, `the ${count} of Pictures`));
  return element("div", { class: "toolbar" }, element("label", {}, "Number", select), element("label", {}, "Over", over),
    element("p", {}, `${chosen.meaning}${reference} Press a head to switch it off and watch the prediction.`));
}

function panel(model, values, low, high, chosen) {
  const heads = [...Array(model.heads).keys()];
  const header = element("tr", {}, element("td"), ...heads.map((h) => element("th", { scope: "col" }, model.heads > 8 ? `${h + 1}` : `head ${h + 1}`)));
  const rows = values.map((layer, l) => element("tr", {}, layerSwitch(model, l), ...layer.map((value, h) => element("td", {}, cell(model, l, h, value, low, high, chosen)))));
  const table = element("table", {}, element("caption", { class: "visually-hidden" }, `${chosen.title} of ${model.name}, layers by heads`),
    element("thead", {}, header), element("tbody", {}, ...rows));
  const corner = element("col");
  corner.style.width = "3.4rem";
  table.prepend(element("colgroup", {}, corner, ...heads.map(() => element("col"))));
  if (model.heads > 6) table.style.minWidth = `${model.heads * 54 + 60}px`;
  return element("section", { class: "card", "aria-label": model.name }, title(model), element("div", { class: "scroll" }, table));
}

function layerSwitch(model, layer) {
  const pairs = [...Array(model.heads).keys()].map((head) => [layer, head]);
  const off = pairs.every(([l, h]) => isOff(model.name, l, h));
  return element("th", { scope: "row" }, element("button", {
    type: "button", class: "heat", "aria-pressed": String(off), "aria-label": `${model.name}, layer ${layer + 1}: switch all heads ${off ? "on" : "off"}`,
    "data-row": layer, "data-model": model.name, onclick: () => switchHeads(model.name, pairs, !off),
  }, `L${layer + 1}`, element("small", {}, off ? "off" : "all")));
}

const short = (value) => (Math.abs(value) >= 10 ? value.toFixed(1) : Math.abs(value) >= 0.0995 || value === 0 ? value.toFixed(2) : Math.abs(value) >= 0.00095 ? value.toFixed(3) : value.toExponential(0));

function cell(model, layer, head, value, low, high, chosen) {
  const off = isOff(model.name, layer, head);
  const colour = sequential((value - low) / (high - low));
  const text = short(value);
  const button = element("button", {
    type: "button", class: "heat", "aria-pressed": String(off), "data-layer": layer, "data-head": head, "data-model": model.name,
    "aria-label": `${model.name}, layer ${layer + 1}, head ${head + 1}: ${chosen.title} ${text}. Switch ${off ? "on" : "off"}`,
    onclick: () => switchHeads(model.name, [[layer, head]], !off),
  }, text, off ? element("small", {}, "off") : null);
  if (!off) {
    button.style.background = css(colour);
    button.style.color = inkOn(colour);
  }
  return button;
}
