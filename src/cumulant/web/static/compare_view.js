// Compare: one layer and head (or the mean of a layer, or the rollout) of every chosen model, large, over the picture.
import { ask } from "./api.js";
import { element, number } from "./dom.js";
import { drawMap, largest, shownWeights } from "./draw.js";
import { offOf, question, title, topOf } from "./maps_view.js";
import { isOff, queryCell, queryToken, set, state, switchHeads } from "./state.js";

const FLOWS = ["rollout", "relevance"];

export async function compareView(models) {
  const kind = FLOWS.includes(state.reading) ? state.reading : null;
  const answers = await Promise.all(models.map((model) => kind ? ask("flow", { ...question(model), kind }) : ask("attention", question(model))));
  const rows = answers.map((answer, i) => rowOf(answer, models[i]));
  const shown = rows.map((row, i) => shownWeights(row, models[i].prefix, state.sign));
  const tops = shown.map(largest);
  const figures = models.map((model, i) => figure(model, rows[i], shown[i], topOf(shown[i], tops[i], tops)));
  return {
    node: element("div", {}, toolbar(), element("div", { class: "panels narrow" }, ...figures)),
    data: models.map((model, i) => ({ model: model.name, reading: state.reading, layer: state.layer, head: state.head, query: queryToken(model), weights: rows[i], off: offOf(model) })),
  };
}

function rowOf(answer, model) {
  if (FLOWS.includes(state.reading)) return answer.weights;
  const layer = answer.weights[Math.min(state.layer, model.layers - 1)];
  if (state.reading === "head") return layer[Math.min(state.head, model.heads - 1)];
  return layer[0].map((_, token) => layer.reduce((sum, head) => sum + head[token], 0) / layer.length);
}

function toolbar() {
  const readings = { head: "this head", layer: "mean of the layer's heads", rollout: "rollout: through all layers", relevance: "relevance for the predicted class" };
  const select = element("select", { id: "reading", onchange: () => set({ reading: select.value }) },
    ...Object.entries(readings).map(([value, text]) => element("option", { value, selected: value === state.reading }, text)));
  const about = {
    head: `What the query takes from each patch in layer ${state.layer + 1}, head ${state.head + 1}.`,
    layer: `The weights of layer ${state.layer + 1}, averaged over its heads.`,
    rollout: "The product of all layers, with residual connections: how the picture reaches this token. Layer and head do not matter.",
    relevance: "Weights times gradients, through all layers: which patches speak for the predicted class. The class token is the query to ask with. Layer and head do not matter.",
  }[state.reading];
  return element("div", { class: "toolbar" }, element("label", {}, "Map", select), element("p", {}, about));
}

function figure(model, row, shown, top) {
  const canvas = element("canvas", { role: "img" });
  const query = state.token ? null : queryCell(model);
  drawMap(canvas, {
    weights: shown, grid: model.grid, top, threshold: state.threshold / 100, query, side: 360,
    picture: pictureOf(model), behind: state.behind / 100,
  });
  const strongest = row.slice(model.prefix).reduce((best, w, i, all) => (Math.abs(w) > Math.abs(all[best]) ? i : best), 0);
  const place = `row ${Math.floor(strongest / model.grid[1]) + 1}, column ${(strongest % model.grid[1]) + 1}`;
  const negative = row.reduce((sum, w) => sum + Math.max(-w, 0), 0);
  const used = row.reduce((s, w) => s + Math.abs(w), 0) ** 2 / Math.max(row.reduce((s, w) => s + w * w, 0), 1e-30);
  canvas.setAttribute("aria-label", `Map of ${model.name}: strongest weight ${number(row[model.prefix + strongest])} at ${place}, negative mass ${number(negative)}`);
  const readout = element("small", {}, "Point at the map to read a weight.");
  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const r = Math.min(Math.max(Math.floor(((event.clientY - box.top) / box.height) * model.grid[0]), 0), model.grid[0] - 1);
    const c = Math.min(Math.max(Math.floor(((event.clientX - box.left) / box.width) * model.grid[1]), 0), model.grid[1] - 1);
    readout.textContent = `row ${r + 1}, column ${c + 1}: weight ${row[model.prefix + r * model.grid[1] + c].toFixed(4)}`;
  };
  canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect();
    set({ token: false, x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height });
  };
  const facts = element("dl", { class: "facts" },
    ...fact("negative mass", number(negative)),
    ...fact("tokens used", `${used.toFixed(1)} of ${row.length}`),
    ...fact("largest weight", number(row[model.prefix + strongest])),
    ...(model.prefix ? fact("to class token", number(row[0])) : []));
  return element("figure", { class: "card figure" }, title(model), canvas, element("figcaption", {}, readout, facts, headSwitch(model)));
}

function headSwitch(model) {
  if (state.reading !== "head" || state.layer >= model.layers || state.head >= model.heads) return null;
  const off = isOff(model.name, state.layer, state.head);
  const button = element("button", {
    type: "button", "aria-pressed": String(off), "data-switch": model.name,
    onclick: () => switchHeads(model.name, [[state.layer, state.head]], !off),
  }, off ? "Switched off: switch on" : "Switch this head off");
  button.style.marginTop = ".6rem";
  return button;
}

export const fact = (name, value) => [element("dt", {}, name), element("dd", {}, value)];

/** The picture as a model sees it, once it is loaded. */
export function pictureOf(model) {
  const image = pictures.get(`${state.image} ${model.name}`);
  return image?.complete && image.naturalWidth ? image : undefined;
}

const pictures = new Map();

/** Have the picture ready before the view is drawn. */
export async function loadPicture(model, address) {
  const key = `${state.image} ${model.name}`;
  if (!pictures.has(key)) {
    const image = new Image();
    image.src = address;
    pictures.set(key, image);
    if (pictures.size > 60) pictures.delete(pictures.keys().next().value);
  }
  await pictures.get(key).decode().catch(() => {});
}
