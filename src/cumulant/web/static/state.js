// What the page shows, kept in the address so that a link brings it back. Uploads are not in it: they are private.

const FRESH = {
  view: "maps", models: [], image: "", x: 0.5, y: 0.5, t: 0.5, token: false, layer: 0, head: 0, sign: "signed", scale: "map",
  threshold: 0, behind: 40, logit_scale: 0, order: 10, metric: "importance", reading: "head", off: {},
  collection: "", dial: "", step: 0, direction: "takes", over: "one", label: "all", judged: "all",
};

export const state = structuredClone(FRESH);
const listeners = [];

/** Call `listener(changed keys)` after every change. */
export const onChange = (listener) => listeners.push(listener);

/** Changes that "Back" takes back one by one; a slider that moves over many values is one place. */
const PLACES = new Set(["view", "image", "models", "x", "y", "t", "token", "metric", "reading", "off", "collection", "dial", "direction", "over"]);

export function set(changes) {
  const keys = Object.keys(changes).filter((key) => JSON.stringify(state[key]) !== JSON.stringify(changes[key]));
  if (!keys.length) return;
  Object.assign(state, changes);
  const kept = { image: state.image }; // an upload is not in the address, but in this tab's own history
  if (keys.some((key) => PLACES.has(key))) history.pushState(kept, "", `#${link()}`);
  else history.replaceState(kept, "", `#${link()}`);
  listeners.forEach((listener) => listener(new Set(keys)));
}

/** What the address and the history of this tab say, in place of all that was chosen. */
export function goTo(info) {
  Object.assign(state, structuredClone(FRESH));
  restore(location.hash.slice(1), info);
  const kept = history.state?.image ?? "";
  if (kept.startsWith("upload-")) state.image = kept;
  const shown = info.examples.find((one) => one.image === state.image);
  if (shown?.collection) state.collection = shown.collection;
  if (!state.collection) state.collection = info.models.find((model) => state.models.includes(model.name))?.collection ?? info.models[0].collection;
  Object.assign(state, begin(info, state.collection, state));
}

const fits = (one, collection) => !one.collection || one.collection === collection;

/** The models and the picture that a collection opens on, where none is chosen. */
export function begin(info, collection, { models = [], image = "" } = {}) {
  const there = info.models.filter((model) => fits(model, collection)), pictures = info.examples.filter((one) => fits(one, collection));
  const kept = models.filter((name) => there.some((model) => model.name === name));
  return {
    models: kept.length ? kept : there.slice(0, 4).map((model) => model.name),
    image: image || (pictures.length ? pictures[Math.min(3, pictures.length - 1)].image : ""),
  };
}

/** The part of a permalink after #. */
export function link() {
  const words = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (JSON.stringify(value) === JSON.stringify(FRESH[key])) continue;
    if (key === "image" && value.startsWith("upload-")) continue;
    if (key === "off") {
      const heads = Object.entries(value).flatMap(([model, pairs]) => pairs.map(([l, h]) => `${model}~${l}~${h}`));
      if (heads.length) words.set("off", heads.join("|"));
    } else if (key === "models") words.set(key, value.join("|"));
    else words.set(key, typeof value === "number" ? String(+value.toFixed(4)) : String(value));
  }
  return words.toString();
}

/** Read a permalink; whatever it says that is not possible is left out. */
function restore(text, info) {
  const words = new URLSearchParams(text);
  const names = info.models.map((model) => model.name);
  const choices = {
    view: ["maps", "compare", "heads", "distance", "lens", "overview", "patterns", ...(info.dials.length ? ["dial"] : [])], sign: ["signed", "positive", "negative"],
    scale: ["map", "model", "all"], reading: ["head", "difference", "layer", "rollout", "relevance", ...(info.models.some((model) => model.interpreter) ? ["interpreter"] : [])], direction: ["takes", "gives"], over: ["one", "many"], judged: ["all", "right", "wrong"],
    collection: info.models.map((model) => model.collection), dial: info.dials.map((dial) => dial.name), label: info.examples.map((example) => example.label),
    image: info.examples.map((example) => example.image),
  };
  for (const [key, allowed] of Object.entries(choices)) if (allowed.includes(words.get(key))) state[key] = words.get(key);
  const ranges = { x: [0, 1], y: [0, 1], t: [0, 1], order: [0, 30], step: [0, 99], threshold: [0, 90], behind: [0, 100], logit_scale: [-20, 20], layer: [0, 999], head: [0, 999] };
  for (const [key, [low, high]] of Object.entries(ranges)) {
    const value = parseFloat(words.get(key));
    if (value >= low && value <= high) state[key] = value;
  }
  for (const key of ["layer", "head", "step"]) state[key] = Math.floor(state[key]);
  state.token = words.get("token") === "true";
  if (/^[a-z0-9_]{1,40}$/.test(words.get("metric") ?? "")) state.metric = words.get("metric");
  state.models = (words.get("models") ?? "").split("|").filter((name) => names.includes(name));
  for (const entry of (words.get("off") ?? "").split("|")) {
    const [model, layer, head] = entry.split("~");
    const found = info.models.find((one) => one.name === model);
    if (found && +layer >= 0 && +layer < found.layers && +head >= 0 && +head < found.heads)
      (state.off[model] ??= []).push([+layer, +head]);
  }
}

export const isOff = (model, layer, head) => (state.off[model] ?? []).some(([l, h]) => l === layer && h === head);

/** Switch heads [[layer, head], ...] of a model on or off. */
export function switchHeads(model, pairs, off) {
  const kept = (state.off[model] ?? []).filter(([l, h]) => !pairs.some(([a, b]) => a === l && b === h));
  const now = { ...state.off, [model]: off ? [...kept, ...pairs] : kept };
  if (!now[model].length) delete now[model];
  set({ off: now });
}

/** Token of the query in a model: its patch under the point (x, y), or the class token. */
export function queryToken(model) {
  if (asksWithToken(model)) return 0;
  const { time, row, col } = queryPlace(model);
  return model.prefix + (time * model.grid[0] + row) * model.grid[1] + col;
}

export const asksWithToken = (model) => state.token && model.prefix > 0;

/** Step in time, row and column of the query patch in a model. */
export const queryPlace = (model) => {
  const at = (share, count) => Math.min(Math.floor(share * count), count - 1);
  return { time: at(state.t, model.times), row: at(state.y, model.grid[0]), col: at(state.x, model.grid[1]) };
};

/** Ask with the patch at a place of a model. */
export const choosePlace = (model, { time, row, col }) => set({
  token: false, t: model.times > 1 ? (time + 0.5) / model.times : state.t,
  x: (col + 0.5) / model.grid[1], y: (row + 0.5) / model.grid[0],
});
