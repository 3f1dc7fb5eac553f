// Head summary: one number per head, as a table of buttons that switch heads off.
import { ask } from "./api.js";
import { css, inkOn, sequential } from "./colour.js";
import { element } from "./dom.js";
import { offOf, title } from "./maps_view.js";
import { isOff, set, state, switchHeads } from "./state.js";

const IMPORTANCE = {
  importance: { title: "importance: change of the answer", meaning: "Jensen-Shannon divergence between the answer with all heads and the answer without this one; 0 is no change, 0.69 the most there is.", key: "divergence" },
  drop: { title: "importance: loss of the predicted class", meaning: "By how much the probability of the predicted class falls without this head; below 0 it rises.", key: "drop" },
};

export async function headsView(models) {
  const summaries = await Promise.all(models.map((model) => ask("summary", { model: model.name, image: state.image, off: [] })));
  const known = summaries[0].metrics;
  const chosen = IMPORTANCE[state.metric] ?? known.find((metric) => metric.name === state.metric) ?? IMPORTANCE.importance;
  const tables = await Promise.all(models.map((model, i) => valuesOf(model, summaries[i], chosen)));
  const all = tables.flat(2);
  const [low, high] = [Math.min(0, ...all), Math.max(...all, 1e-9)];
  const panels = models.map((model, i) => panel(model, tables[i], low, high, chosen));
  return {
    node: element("div", {}, toolbar(known, chosen), element("div", { class: "panels wide" }, ...panels)),
    data: models.map((model, i) => ({ model: model.name, metric: chosen.title, values: tables[i], summary: summaries[i].metrics })),
  };
}

/** Layers by heads; importance is asked layer by layer, so that no answer takes long. */
async function valuesOf(model, summary, chosen) {
  if (!chosen.key) return summary.metrics.find((metric) => metric.name === chosen.name)?.values ?? [];
  const layers = [...Array(model.layers).keys()];
  const answers = [];
  for (const layer of layers) answers.push(await ask("importance", { model: model.name, image: state.image, layer, off: [] }));
  return answers.map((answer) => answer[chosen.key]);
}

function toolbar(known, chosen) {
  const options = [...Object.entries(IMPORTANCE).map(([name, one]) => [name, one.title]), ...known.map((one) => [one.name, one.title])];
  const select = element("select", { id: "metric", onchange: () => set({ metric: select.value }) },
    ...options.map(([value, text]) => element("option", { value, selected: text === chosen.title }, text)));
  const reference = typeof chosen.reference === "number" ? ` A map that is the same everywhere has ${chosen.reference.toFixed(2)}.` : "";
  return element("div", { class: "toolbar" }, element("label", {}, "Number", select),
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

function cell(model, layer, head, value, low, high, chosen) {
  const off = isOff(model.name, layer, head);
  const colour = sequential((value - low) / (high - low));
  const text = Math.abs(value) >= 10 ? value.toFixed(1) : Math.abs(value) >= 0.0995 || value === 0 ? value.toFixed(2) : Math.abs(value) >= 0.00095 ? value.toFixed(3) : value.toExponential(0);
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
