// All heads: one small map for every layer and head of every chosen model.
import { ask } from "./api.js";
import { element, percent } from "./dom.js";
import { drawMap, largest, shownWeights } from "./draw.js";
import { asksWithToken, isOff, queryPlace, queryToken, set, state } from "./state.js";

export async function mapsView(models) {
  const answers = await Promise.all(models.map((model) => ask("attention", question(model))));
  const shown = answers.map((answer, i) => answer.weights.map((layer) => layer.map((head) => shownWeights(head, models[i].prefix, state.sign))));
  const tops = shown.map((maps) => Math.max(...maps.flat().map(largest)));
  const panels = models.map((model, i) => panel(model, answers[i], shown[i], (map) => topOf(map, tops[i], tops)));
  const many = models.some((model) => model.heads > 8);
  return { node: element("div", { class: many ? "panels full" : "panels wide" }, ...panels), data: answers, top: commonTop(tops) };
}

export const question = (model) => ({
  model: model.name, image: state.image, query: queryToken(model), off: offOf(model),
  ...(state.direction === "gives" && ["maps", "compare"].includes(state.view) ? { reverse: true } : {}),
});

/** In words, along what a layer of a video model looks. */
export const LOOKS = { all: "", space: ", within each frame", time: ", over time at one place", frames: ", over whole frames" };

export const offOf = (model) => (state.off[model.name] ?? []).map(([layer, head]) => ({ layer, head }));

/** The weight of full colour, by the scale that was chosen. */
export const topOf = (map, ofModel, ofAll) =>
  ({ map: largest(map), model: ofModel, all: Math.max(...ofAll) })[state.scale];

/** The weight of full colour where it is the same for all maps that are shown. */
export const commonTop = (ofModels) => (state.scale === "all" || (state.scale === "model" && ofModels.length === 1) ? Math.max(...ofModels) : undefined);

export function title(model) {
  const facts = model.accuracy === null ? model.title : `${percent(model.accuracy)} top-1`;
  return element("div", { class: "panel-title" }, element("h3", {}, model.name), element("span", { title: model.title }, facts));
}

function panel(model, answer, shown, top) {
  const heads = [...Array(model.heads).keys()];
  const header = element("tr", {}, element("td", { class: "corner" }), ...heads.map((h) => element("th", { scope: "col" }, model.heads > 8 ? `${h + 1}` : `head ${h + 1}`)));
  const rows = shown.map((layer, l) =>
    element("tr", {}, element("th", { scope: "row", title: `layer ${l + 1}${LOOKS[model.axes[l]]}` }, `L${l + 1}`,
      model.axes[l] === "all" ? null : element("small", {}, model.axes[l])),
      ...layer.map((map, h) => element("td", {}, mapButton(model, answer, map, l, h, top(map))))));
  const table = element("table", {}, element("caption", { class: "visually-hidden" }, `Maps of ${model.name}, layers by heads`),
    element("thead", {}, header), element("tbody", {}, ...rows));
  if (model.heads > 6) table.style.minWidth = `${model.heads * 34 + 34}px`;
  if (model.layers > 6) table.style.maxWidth = `${model.heads * 130 + 34}px`; // so that many layers stay in sight together
  const corner = element("col");
  corner.style.width = model.axes.every((one) => one === "all") ? "1.9rem" : "2.7rem";
  table.prepend(element("colgroup", {}, corner, ...heads.map(() => element("col"))));
  return element("section", { class: "card", "aria-label": model.name }, title(model), element("div", { class: "scroll" }, table));
}

function mapButton(model, answer, map, layer, head, top) {
  const off = isOff(model.name, layer, head);
  const canvas = element("canvas");
  const mass = answer.negative_mass[layer][head];
  const query = asksWithToken(model) ? null : queryPlace(model);
  drawMap(canvas, { weights: map, model, top, threshold: state.threshold / 100, query, side: 120 });
  const label = `${model.name}, layer ${layer + 1}, head ${head + 1}${off ? ", switched off" : ""}: negative mass ${mass.toFixed(2)}, ` +
    `spread over ${answer.tokens_used[layer][head].toFixed(1)} tokens. Open in Compare.`;
  const compact = model.heads > 6;
  return element("button", {
    type: "button", class: `map${off ? " off" : ""}`, "aria-label": label, title: label,
    "aria-pressed": String(state.layer === layer && state.head === head), "data-layer": layer, "data-head": head,
    onclick: () => set({ layer, head, view: "compare" }),
  }, canvas, compact ? null : element("small", { "aria-hidden": "true" }, off ? "off" : mass >= 0.005 ? `neg. ${mass.toFixed(2)}` : "neg. 0"));
}
