// Pictures: all examples with what the first model says of them, by class and by error; Patterns: kinds of maps over them.
import { ask, pictureAddress } from "./api.js";
import { css, diverging, inkOn, sequential } from "./colour.js";
import { byId, element, percent } from "./dom.js";
import { title } from "./maps_view.js";
import { set, state } from "./state.js";

let examples = [];
export const haveExamples = (there) => { examples = there; };
const ofCollection = () => examples.filter((one) => !one.collection || one.collection === state.collection);

/** The examples that were chosen by class and by error; those that nobody has judged yet count as chosen. */
export const chosenImages = () => ofCollection().filter((one) =>
  (state.label === "all" || one.label === state.label) && (state.judged === "all" || !judged.has(key(one.image)) || judged.get(key(one.image)) === (state.judged === "right")))
  .map((one) => one.image);

const judged = new Map(); // image of the first model: whether it was right
const key = (image) => `${state.models[0]} ${image}`;

export async function overviewView(models, wanted) {
  const model = models[0], images = ofCollection(), answers = new Map();
  for (const [i, one] of images.entries()) {
    if (!model.classes) break;
    if (!wanted()) return { node: element("div"), data: [] };
    if (i % 8 === 7) byId("status").textContent = `${model.name}: ${i + 1} of ${images.length} pictures …`;
    const answer = await ask("prediction", { model: model.name, image: one.image, off: [] });
    answers.set(one.image, answer.choices[0]);
    if (one.label) judged.set(key(one.image), answer.choices[0].name === one.label);
  }
  byId("status").textContent = "";
  const shown = new Set(chosenImages());
  const right = images.filter((one) => judged.get(key(one.image))).length;
  const said = model.classes ? `${model.name} is right on ${right} of ${images.length}.` : `${model.name} has no classes to be right or wrong about.`;
  const tiles = images.filter((one) => shown.has(one.image)).map((one) => tile(one, answers.get(one.image)));
  return {
    node: element("div", {}, toolbar(images, `${said} Head summary and Patterns can be asked over the ${shown.size} shown here.`), element("div", { class: "tiles" }, ...tiles)),
    data: images.map((one) => ({ image: one.image, label: one.label, said: answers.get(one.image)?.name, probability: answers.get(one.image)?.before })),
  };
}

function toolbar(images, text) {
  const labels = [...new Set(images.map((one) => one.label))].sort();
  const choice = (id, words, now) => {
    const select = element("select", { id, onchange: () => set({ [id]: select.value }) }, ...words.map(([value, word]) => element("option", { value, selected: value === now }, word)));
    return select;
  };
  return element("div", { class: "toolbar" },
    element("label", {}, "Class", choice("label", [["all", "all"], ...labels.map((one) => [one, one])], state.label)),
    element("label", {}, "Answer", choice("judged", [["all", "all"], ["wrong", "wrong"], ["right", "right"]], state.judged)), element("p", {}, text));
}

function tile(one, said) {
  const right = said && one.label ? said.name === one.label : null;
  const words = said ? `${said.name} ${percent(said.before, 0)}` : one.label;
  return element("button", { type: "button", class: `tile ${right === false ? "wrong" : ""}`, "data-image": one.image, "aria-pressed": String(state.image === one.image),
    "aria-label": `example ${one.label}${said ? `, said ${said.name}${right ? "" : ", wrong"}` : ""}. Look at it`, onclick: () => set({ image: one.image, view: "maps" }) },
  element("img", { src: pictureAddress(one.image, null, 0, 96), alt: "", class: "pixels", loading: "lazy" }), element("small", {}, words), element("small", {}, right === false ? `✗ is ${one.label}` : right ? "✓" : ""));
}

/** One square for every kind of map, and of every head the share of its maps that are of each kind. */
export async function patternsView(models) {
  const images = chosenImages();
  if (!images.length) return { node: element("p", {}, "No picture is chosen; see Pictures."), data: [] };
  const answers = await Promise.all(models.map((model) => ask("patterns", { model: model.name, images })));
  const about = element("p", {}, `Maps of all heads over ${images.length} pictures (chosen in Pictures), put into kinds: patches averaged to 4 × 4 places, queries down, keys across. ` +
    "A head with one kind does the same to every picture. Press a head to open it.");
  return { node: element("div", {}, element("div", { class: "toolbar" }, about), ...models.map((model, i) => kindsOf(model, answers[i]))), data: answers };
}

function kindsOf(model, answer) {
  const kinds = answer.clusters.map((one, k) => element("figure", { class: "figure kind" }, element("h3", {}, `${k + 1}: ${one.kind}`), square(one.centre), element("small", {}, `${percent(one.share, 0)} of ${answer.maps} maps`)));
  const heads = [...Array(model.heads).keys()];
  const header = element("tr", {}, element("td"), ...heads.map((h) => element("th", { scope: "col" }, `head ${h + 1}`)));
  const rows = answer.shares.map((layer, l) => element("tr", {}, element("th", { scope: "row" }, `L${l + 1}`), ...layer.map((shares, h) => element("td", {}, headCell(model, answer, l, h, shares)))));
  const table = element("table", {}, element("caption", { class: "visually-hidden" }, `Kinds of maps of ${model.name}, layers by heads`), element("thead", {}, header), element("tbody", {}, ...rows));
  const corner = element("col");
  corner.style.width = "2.4rem";
  table.prepend(element("colgroup", {}, corner, ...heads.map(() => element("col"))));
  if (model.heads > 6) table.style.minWidth = `${model.heads * 80 + 60}px`;
  return element("section", { class: "card lens", "aria-label": `Patterns of ${model.name}` }, title(model), element("div", { class: "kinds" }, ...kinds), element("div", { class: "scroll" }, table));
}

function headCell(model, answer, layer, head, shares) {
  const best = shares.indexOf(Math.max(...shares)), colour = sequential(shares[best] * 0.75);
  const button = element("button", { type: "button", class: "heat", "data-layer": layer, "data-head": head, "data-model": model.name,
    "aria-label": `${model.name}, layer ${layer + 1}, head ${head + 1}: ${percent(shares[best], 0)} ${answer.clusters[best].kind}. Open in Compare`, onclick: () => set({ layer, head, reading: "head", view: "compare" }) },
  `${best + 1}: ${answer.clusters[best].kind}`, element("small", {}, percent(shares[best], 0)));
  button.style.background = css(colour);
  button.style.color = inkOn(colour);
  return button;
}

function square(centre) {
  const n = centre.length, cell = 6, canvas = element("canvas", { role: "img", "aria-label": "mean map of this kind" });
  canvas.width = canvas.height = n * cell;
  const paint = canvas.getContext("2d"), top = Math.max(...centre.flat().map(Math.abs), 1e-9);
  centre.forEach((row, i) => row.forEach((value, j) => {
    paint.fillStyle = css(diverging(value / top));
    paint.fillRect(j * cell, i * cell, cell, cell);
  }));
  return canvas;
}
