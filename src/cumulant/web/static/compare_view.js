// Compare: one layer and head (or the mean of a layer, or the rollout) of every chosen model, large, over the picture.
import { ask, pictureAddress } from "./api.js";
import { element, number } from "./dom.js";
import { drawMap, largest, placeAt, shownWeights } from "./draw.js";
import { commonTop, LOOKS, offOf, question, title, topOf } from "./maps_view.js";
import { asksWithToken, choosePlace, isOff, queryPlace, queryToken, set, state, switchHeads } from "./state.js";

const FLOWS = ["rollout", "relevance", "interpreter"];
const ONE = ["head", "difference"];
const SIDE = 360;

export async function compareView(models) {
  const kind = FLOWS.includes(state.reading) ? state.reading : null;
  const answers = await Promise.all(models.map((model) => kind ? ask("flow", { ...question(model), reverse: undefined, kind }) : ask("attention", question(model))));
  const rows = answers.map((answer, i) => rowOf(answer, models[i]));
  const shown = rows.map((row, i) => shownWeights(row, models[i].prefix, state.sign));
  const tops = shown.map(largest);
  const figures = models.map((model, i) => figure(model, rows[i], shown[i], topOf(shown[i], tops[i], tops)));
  const [one, other] = models, alike = other && String([one.prefix, one.times, ...one.grid]) === String([other.prefix, other.times, ...other.grid]);
  if (alike && state.reading === "difference") {
    const less = rows[0].map((w, i) => w - rows[1][i]), drawn = shownWeights(less, one.prefix, state.sign);
    figures.push(figure({ ...one, name: `${one.name} − ${other.name}`, title: "difference of the first two", accuracy: null }, less, drawn, state.scale === "all" ? Math.max(...tops) : largest(drawn), true));
  }
  return {
    node: element("div", {}, toolbar(models), element("div", { class: models.some((m) => m.times > 1) ? "panels" : "panels narrow" }, ...figures)),
    data: models.map((model, i) => ({ model: model.name, reading: state.reading, layer: state.layer, head: state.head, query: queryToken(model), weights: rows[i], off: offOf(model) })),
    top: tops.length === 1 ? tops[0] : commonTop(tops),
  };
}

function rowOf(answer, model) {
  if (FLOWS.includes(state.reading)) return answer.weights;
  const layer = answer.weights[Math.min(state.layer, model.layers - 1)];
  if (ONE.includes(state.reading)) return layer[Math.min(state.head, model.heads - 1)];
  return layer[0].map((_, token) => layer.reduce((sum, head) => sum + head[token], 0) / layer.length);
}

function toolbar(models) {
  const readings = { head: "this head", difference: "this head, difference of the first two", layer: "mean of the layer's heads", rollout: "rollout: through all layers", relevance: "relevance for the predicted class",
    ...(models.some((model) => model.interpreter) ? { interpreter: "interpreter: what it keeps" } : {}) };
  const select = element("select", { id: "reading", onchange: () => set({ reading: select.value }) },
    ...Object.entries(readings).map(([value, text]) => element("option", { value, selected: value === state.reading }, text)));
  const about = {
    head: `${state.direction === "gives" ? "What each patch takes from the chosen one" : "What the query takes from each patch"} in layer ${state.layer + 1}, head ${state.head + 1}${looks(models)}.`,
    difference: models.length > 1 ? `Layer ${state.layer + 1}, head ${state.head + 1} of ${models[0].name} less that of ${models[1].name}, where both have the same patches.` : "Choose a second model to see the difference.",
    layer: `The weights of layer ${state.layer + 1}, averaged over its heads.`,
    rollout: "The product of all layers, with residual connections: how the picture reaches this token. Layer and head do not matter.",
    relevance: "Weights times gradients, through all layers: which patches speak for the predicted class. The class token is the query to ask with. Layer and head do not matter.",
    interpreter: "How much each patch says to the last interpreter, from 0 to 1; 0 where an earlier one dropped it. Query, layer and head do not matter.",
  }[state.reading];
  return element("div", { class: "toolbar" }, element("label", {}, "Map", select), element("p", {}, about));
}

/** What the chosen layer looks at, where the models have that in common. */
function looks(models) {
  const kinds = new Set(models.map((model) => model.axes[Math.min(state.layer, model.layers - 1)]));
  return kinds.size === 1 ? LOOKS[[...kinds][0]] : "";
}

/** Words for a patch: its row and column, and its step in time in a clip. */
export function placeName(model, patch) {
  const [rows, cols] = model.grid;
  const time = model.times > 1 ? `frame ${Math.floor(patch / (rows * cols)) + 1}, ` : "";
  return `${time}row ${(Math.floor(patch / cols) % rows) + 1}, column ${(patch % cols) + 1}`;
}

function figure(model, row, shown, top, difference = false) {
  const canvas = element("canvas", { role: "img" });
  const query = asksWithToken(model) ? null : queryPlace(model);
  drawMap(canvas, {
    weights: shown, model, top, threshold: state.threshold / 100, query, side: SIDE,
    pictures: picturesOf(model), behind: state.behind / 100,
  });
  const strongest = row.slice(model.prefix).reduce((best, w, i, all) => (Math.abs(w) > Math.abs(all[best]) ? i : best), 0);
  const negative = row.reduce((sum, w) => sum + Math.max(-w, 0), 0);
  const used = row.reduce((s, w) => s + Math.abs(w), 0) ** 2 / Math.max(row.reduce((s, w) => s + w * w, 0), 1e-30);
  canvas.setAttribute("aria-label", `Map of ${model.name}: strongest weight ${number(row[model.prefix + strongest])} at ${placeName(model, strongest)}, negative mass ${number(negative)}`);
  const readout = element("small", {}, "Point at the map to read a weight.");
  canvas.onpointermove = (event) => {
    const { time, row: r, col: c } = placeAt(event, canvas, model, SIDE);
    const patch = (time * model.grid[0] + r) * model.grid[1] + c;
    readout.textContent = `${placeName(model, patch)}: weight ${row[model.prefix + patch].toFixed(4)}`;
  };
  canvas.onclick = (event) => choosePlace(model, placeAt(event, canvas, model, SIDE));
  const facts = element("dl", { class: "facts" },
    ...fact(difference ? "moved" : "negative mass", number(negative)),
    ...(difference ? [] : fact("tokens used", `${used.toFixed(1)} of ${row.length}`)),
    ...fact("largest weight", number(row[model.prefix + strongest])),
    ...(model.prefix ? fact("to class token", number(row[0])) : []));
  return element("figure", { class: "card figure" }, title(model), canvas, element("figcaption", {}, readout, facts, difference ? null : headSwitch(model)));
}

function headSwitch(model) {
  if (!ONE.includes(state.reading) || state.layer >= model.layers || state.head >= model.heads) return null;
  const off = isOff(model.name, state.layer, state.head);
  const button = element("button", {
    type: "button", "aria-pressed": String(off), "data-switch": model.name,
    onclick: () => switchHeads(model.name, [[state.layer, state.head]], !off),
  }, off ? "Switched off: switch on" : "Switch this head off");
  button.style.marginTop = ".6rem";
  return button;
}

export const fact = (name, value) => [element("dt", {}, name), element("dd", {}, value)];

const pictures = new Map();
const pictureKey = (model, time) => `${state.image} ${model.name} ${time}`;

/** The picture as a model sees it, at each step in time, once they are loaded. */
export const picturesOf = (model) => [...Array(model.times).keys()].map((time) => {
  const image = pictures.get(pictureKey(model, time));
  return image?.complete && image.naturalWidth ? image : undefined;
});

/** Have the pictures ready before the view is drawn. */
export async function loadPictures(model) {
  await Promise.all([...Array(model.times).keys()].map((time) => {
    const key = pictureKey(model, time);
    if (!pictures.has(key)) {
      const image = new Image();
      image.src = pictureAddress(state.image, model.name, time);
      pictures.set(key, image);
      if (pictures.size > 300) pictures.delete(pictures.keys().next().value);
    }
    return pictures.get(key).decode().catch(() => {});
  }));
}
