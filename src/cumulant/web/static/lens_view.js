// Lens: one layer's own queries and keys under a sliding order of the expansion, up to softmax, at any logit scale.
import { ask } from "./api.js";
import { element, number, percent } from "./dom.js";
import { drawMap, largest, placeAt, shownWeights } from "./draw.js";
import { fact, picturesOf } from "./compare_view.js";
import { offOf } from "./maps_view.js";
import { asksWithToken, choosePlace, queryPlace, queryToken, state } from "./state.js";

const STOPS = ["cumulant1", "cumulant2", "cumulant3", "softmax"]; // at slider steps 0, 10, 20 and 30
const SIDE = 330;

/** Slider steps to factors: -20 is 0.1, 0 is 1, 20 is 10. */
export const logitScaleOf = (step) => 10 ** (step / 20);

/** What a step of the order slider stands for: "2", "2.4", "softmax". */
export function orderName(step) {
  if (step >= 30) return "softmax";
  if (step > 20) return `3 and ${(step - 20) * 10} % of the rest`;
  return step % 10 ? (1 + step / 10).toFixed(1) : `${1 + step / 10}`;
}

/**
 * Weights at a step of the order slider: the expansion up to a whole order, and of the next term the share that the
 * slider has gone towards it (beyond order 3 of all terms that are left, whose sum is softmax). Rows still sum to 1.
 */
export function atOrder(maps, head, step) {
  const low = Math.min(Math.floor(step / 10), STOPS.length - 2), share = step / 10 - low;
  const [from, to] = [low, low + 1].map((stop) => maps.find((map) => map.name === STOPS[stop]).weights[head]);
  return from.map((w, i) => w + share * (to[i] - w));
}

export async function lensView(models) {
  const able = models.filter((model) => model.lens);
  const answers = await Promise.all(able.map((model) => ask("lens", {
    model: model.name, image: state.image, query: queryToken(model), off: offOf(model),
    layer: Math.min(state.layer, model.layers - 1), logit_scale: logitScaleOf(state.logit_scale),
  })));
  const made = able.map((model, i) => section(model, answers[i]));
  const about = element("p", {}, "The queries and keys of one trained head, weighed anew. Move the order from the plain mean over 2 and 3 to softmax: " +
    "between whole orders the next term counts in part. Lower the logit scale and all orders meet softmax; raise it, which sharpens softmax, and they part. " +
    "Off by: half the sum of all differences from the weights of softmax.");
  const missing = able.length < models.length ? element("p", { class: "hint" },
    `Not shown: ${models.filter((m) => !m.lens).map((m) => m.name).join(", ")}, whose layers see parts of a clip.`) : null;
  return { node: element("div", {}, element("div", { class: "toolbar" }, about), ...made.map((one) => one.node), missing), data: answers, top: made.length === 1 ? made[0].top : undefined };
}

function section(model, answer) {
  const head = Math.min(state.head, model.heads - 1);
  const softmax = answer.maps.find((map) => map.name === "softmax").weights[head];
  const now = atOrder(answer.maps, head, state.order);
  const rows = [now, ...answer.maps.map((map) => map.weights[head])];
  const shown = rows.map((row) => shownWeights(row, model.prefix, state.sign));
  const top = Math.max(...shown.map(largest));
  const names = [`order ${orderName(state.order)}`.replace("order softmax", "softmax"), ...answer.maps.map((map) => map.title)];
  const figures = rows.map((row, i) => figure(model, names[i], row, shown[i], top, offBy(row, softmax), i === 0));
  const heading = element("div", { class: "panel-title" }, element("h3", {}, `keys and queries of the ${model.name} model`),
    element("span", {}, `layer ${answer.layer + 1}, head ${head + 1}: logits spread ${number(answer.logit_size[head])}`));
  const node = element("section", { class: "card lens", "aria-label": `Lens on ${model.name}` }, heading,
    element("div", { class: "lens-body" }, figures[0],
      element("div", {}, element("div", { class: "row" }, ...figures.slice(1)), curve(answer.maps, head, softmax))));
  return { node, top };
}

/** How far the map is from softmax along the whole slider, with a dot where it stands. */
function curve(maps, head, softmax) {
  const [width, height, left, right, top, bottom] = [560, 150, 68, 14, 14, 26];
  const values = [...Array(31).keys()].map((step) => offBy(atOrder(maps, head, step), softmax));
  const most = Math.max(...values, 0.01);
  const x = (step) => left + (step / 30) * (width - left - right);
  const y = (value) => height - bottom - (value / most) * (height - top - bottom);
  const stops = ["1", "2", "3", "softmax"].map((name, i) => drawn("text", { x: x(10 * i), y: height - 8, "text-anchor": i < 3 ? "middle" : "end" }, name));
  const lines = [0, 10, 20, 30].map((step) => drawn("line", { x1: x(step), x2: x(step), y1: top, y2: height - bottom, class: "grid" }));
  const text = `Off by, along the order: ${[0, 10, 20, 30].map((step) => `${orderName(step)} ${percent(values[step])}`).join(", ")}; now ${percent(values[state.order])}`;
  return drawn("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": text },
    ...lines, drawn("text", { x: left - 8, y: y(most) + 4, "text-anchor": "end" }, percent(most, 0)),
    drawn("text", { x: left - 8, y: y(0) + 4, "text-anchor": "end" }, "0 %"), ...stops,
    drawn("polyline", { points: values.map((value, step) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }),
    drawn("circle", { cx: x(state.order), cy: y(values[state.order]), r: 5 }));
}

function drawn(tag, options, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(options)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const offBy = (row, softmax) => row.reduce((sum, w, i) => sum + Math.abs(w - softmax[i]), 0) / 2;

function figure(model, name, row, shown, top, away, large) {
  const canvas = element("canvas", { role: "img", "aria-label": `${name} of ${model.name}: ${number(away)} away from softmax` });
  const side = large ? SIDE : 200;
  drawMap(canvas, {
    weights: shown, model, top, threshold: state.threshold / 100, query: asksWithToken(model) ? null : queryPlace(model),
    side, pictures: picturesOf(model), behind: state.behind / 100,
  });
  canvas.onclick = (event) => choosePlace(model, placeAt(event, canvas, model, side));
  const negative = row.reduce((sum, w) => sum + Math.max(-w, 0), 0);
  const greatest = row.reduce((most, w) => Math.max(most, Math.abs(w)), 0);
  return element("figure", { class: large ? "figure now" : "figure" }, element("h3", {}, name), canvas,
    element("dl", { class: "facts" }, ...fact("off by", percent(away, large ? 1 : 0)), ...fact("negative", number(negative)),
      ...(large ? fact("largest weight", number(greatest)) : [])));
}
