// The page: reads what there is, keeps controls and state together, redraws what a change touches.
import * as api from "./api.js";
import { drawCharts, haveCharts, pictures } from "./charts.js";
import { compareView, loadPictures } from "./compare_view.js";
import { dialView, haveDials } from "./dial_view.js";
import { distanceView } from "./distance_view.js";
import { byId, element, number, save } from "./dom.js";
import { drawLegend } from "./draw.js";
import { headsView } from "./heads_view.js";
import { lensView, logitScaleOf, orderName } from "./lens_view.js";
import { mapsView } from "./maps_view.js";
import { chosenImages, haveExamples, overviewView, patternsView } from "./overview_view.js";
import { makeExamples, makeUpload, predictionsOf, showBoard } from "./picture.js";
import { asksWithToken, begin, goTo, onChange, queryPlace, set, state } from "./state.js";

const VIEWS = {
  maps: mapsView, compare: compareView, dial: dialView, heads: (models, wanted) => headsView(models, wanted, chosenImages()), distance: distanceView, lens: lensView,
  overview: overviewView, patterns: patternsView,
};
let info, sendAgain, shownData = [], shownTop, turn = 0;

const say = (text) => (byId("status").textContent = text);
function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

const inCollection = (one) => !one.collection || one.collection === state.collection;
const chosenModels = () => info.models.filter((model) => state.models.includes(model.name));

async function redraw() {
  const mine = ++turn;
  const models = chosenModels();
  const view = byId("view");
  for (const part of [view, byId("predictions")]) part.setAttribute("aria-busy", "true");
  byId("problem").hidden = true;
  const began = performance.now();
  try {
    showBoard(models[0]);
    if (state.view === "compare" || state.view === "lens")
      await Promise.all(models.map(loadPictures));
    const [{ node, data, top }, predictions] = await Promise.all([VIEWS[state.view](models, () => mine === turn), predictionsOf(models)]);
    if (mine !== turn) return; // another picture or view was chosen meanwhile: what belongs to this one is not shown
    const kept = focusKey();
    view.replaceChildren(node);
    byId("predictions").replaceChildren(...predictions);
    byId("all-on").hidden = !Object.keys(state.off).length;
    shownTop = top;
    showTop();
    if (kept) view.querySelector(kept)?.focus();
    shownData = data;
    drawCharts(view);
    view.dataset.milliseconds = Math.round(performance.now() - began);
  } catch (error) {
    if (mine !== turn) return;
    if (error.kind === "unknown_image" && state.image.startsWith("upload-")) {
      if (sendAgain()) say("The server has let go of the picture; sending it again.");
      else complain("The server has let go of your picture; please upload it again.");
    } else complain(error.kind ? error.message : "The explorer does not answer. Is `cumulant explore` still running?");
  } finally {
    if (mine === turn) for (const part of [view, byId("predictions")]) part.setAttribute("aria-busy", "false");
  }
}

/** The numbers at the ends of the legend: the weight of full colour, where it is one for all maps. */
function showTop() {
  const [low, high] = state.sign === "positive" ? ["0", 1] : state.sign === "negative" ? [1, "0"] : [1, 1];
  const words = (end, sign) => (end === "0" ? "0" : shownTop ? `${sign}${number(shownTop)}` : `${sign}max`);
  byId("legend-low").textContent = words(low, "−");
  byId("legend-high").textContent = words(high, "+");
}

/** Redrawing replaces elements; the one that had the focus is found again by what it stands for. */
function focusKey() {
  const focused = document.activeElement;
  if (!byId("view").contains(focused)) return null;
  if (focused.id) return `#${focused.id}`;
  const data = Object.entries(focused.dataset).map(([key, value]) => `[data-${key}="${CSS.escape(value)}"]`).join("");
  return data ? `${focused.tagName.toLowerCase()}${data}` : null;
}

function showControls() {
  for (const [view] of Object.entries(VIEWS)) {
    const tab = byId(`tab-${view}`);
    tab.setAttribute("aria-selected", String(view === state.view));
    tab.tabIndex = view === state.view ? 0 : -1;
  }
  byId("view").setAttribute("aria-labelledby", `tab-${state.view}`);
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(state.view);
  for (const input of document.querySelectorAll("#models input")) {
    input.checked = state.models.includes(input.value);
    input.parentElement.hidden = !inCollection(info.models.find((model) => model.name === input.value));
  }
  for (const input of document.querySelectorAll("#collections input")) input.checked = input.value === state.collection;
  for (const input of document.querySelectorAll("#examples input")) {
    const example = info.examples.find((one) => one.image === input.value);
    input.parentElement.hidden = Boolean(example) && !inCollection(example);
  }
  document.querySelector(".strip").hidden = state.view === "dial" || !chosenModels().some((model) => model.classes);
  for (const name of ["sign", "scale", "direction"]) for (const input of document.querySelectorAll(`input[name=${name}]`)) input.checked = input.value === state[name];
  const models = chosenModels();
  range("layer", Math.max(...models.map((m) => m.layers)), state.layer + 1);
  range("head", Math.max(...models.map((m) => m.heads)), state.head + 1);
  range("threshold", 90, state.threshold, `${state.threshold} %`);
  range("behind", 100, state.behind, `${state.behind} %`);
  range("order", 30, state.order, orderName(state.order));
  range("logit_scale", 20, state.logit_scale, `× ${logitScaleOf(state.logit_scale).toFixed(2)}`);
  drawLegend(byId("legend-bar"), state.threshold / 100, state.sign);
}

function range(id, max, value, text = `${value} of ${max}`) {
  const input = byId(id);
  input.max = max;
  input.value = value;
  input.setAttribute("aria-valuetext", text);
  byId(`${id}-out`).textContent = text;
}

function makeControls() {
  byId("models").append(...info.models.map((model) => element("label", { title: model.title },
    element("input", { type: "checkbox", value: model.name, onchange: chooseModels }), ` ${model.name}`)));
  const collections = [...new Set(info.models.map((model) => model.collection))].filter(Boolean);
  byId("collections").hidden = collections.length < 2;
  byId("collections").append(...collections.map((name) => element("label", {},
    element("input", { type: "radio", name: "collection", value: name, onchange: () => set({ collection: name, off: {}, label: "all", judged: "all", ...begin(info, name) }) }), ` ${name}`)));
  byId("tab-dial").hidden = !info.dials.length;
  const number = (id, key, shift = 0) => (byId(id).oninput = (event) => set({ [key]: +event.target.value - shift }));
  number("layer", "layer", 1);
  number("head", "head", 1);
  for (const id of ["threshold", "behind", "logit_scale", "order"]) number(id, id);
  byId("watch").onclick = watch;
  for (const name of ["sign", "scale", "direction"]) byId(name).onchange = (event) => set({ [name]: event.target.value });
  byId("class-token").onclick = () => set({ token: !state.token });
  byId("all-on").onclick = () => set({ off: {} });
  const tabs = Object.keys(VIEWS).filter((view) => view !== "dial" || info.dials.length);
  for (const view of tabs) byId(`tab-${view}`).onclick = () => set({ view });
  document.querySelector(".tabs").onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const view = tabs[(tabs.indexOf(state.view) + step + tabs.length) % tabs.length];
    set({ view });
    byId(`tab-${view}`).focus();
  };
  byId("copy-link").onclick = copyLink;
  byId("save-data").onclick = () => save("attention.json", new Blob([JSON.stringify({ image: state.image, view: state.view, shown: shownData }, null, 1)], { type: "application/json" }));
  byId("save-figure").onclick = saveFigure;
}

/** The order slider moves by itself, once, from the mean to softmax. */
let watching = null;
function watch() {
  clearInterval(watching);
  set({ order: 0 });
  watching = setInterval(() => {
    if (state.view !== "lens" || state.order >= 30) return clearInterval(watching);
    set({ order: state.order + 1 });
  }, 130);
}

function chooseModels(event) {
  const chosen = [...document.querySelectorAll("#models input:checked")].map((input) => input.value);
  if (chosen.length) set({ models: chosen });
  else {
    event.target.checked = true;
    say("At least one model stays.");
  }
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    say(state.image.startsWith("upload-") ? "Link copied; your upload is not part of it." : "Link copied.");
  } catch {
    say("The browser does not allow copying; the address line holds the link.");
  }
}

/** What a saved figure is of, in words. */
function caption() {
  const example = info.examples.find((one) => one.image === state.image);
  const model = chosenModels()[0];
  const { time, row, col } = queryPlace(model);
  const place = `${model.times > 1 ? `frame ${time + 1}, ` : ""}row ${row + 1}, column ${col + 1}`;
  const parts = [example ? `example ${example.label}` : "an upload", `query: ${asksWithToken(model) ? "class token" : place}`];
  if (state.view === "lens" || (state.view === "compare" && ["head", "difference"].includes(state.reading))) parts.push(`layer ${state.layer + 1}, head ${state.head + 1}`);
  if (state.view === "compare" && state.reading === "layer") parts.push(`layer ${state.layer + 1}`);
  if (["maps", "compare"].includes(state.view) && state.direction === "gives") parts.push("who looks at it");
  if (state.view === "lens") parts.push(`logit scale ${logitScaleOf(state.logit_scale).toFixed(2)}`);
  if (state.view === "compare" && !["head", "layer"].includes(state.reading)) parts.push(state.reading);
  return parts.join(" · ");
}

/** Picture, words and colour bar above the maps, in a strip of 96 pixels. */
function paintHead(paint, width) {
  const picture = byId("picture");
  paint.imageSmoothingEnabled = !picture.classList.contains("pixels");
  if (picture.complete && picture.naturalWidth) paint.drawImage(picture, 12, 12, 72, 72);
  paint.fillStyle = "#171c26";
  paint.textBaseline = "middle";
  paint.textAlign = "left";
  paint.font = "600 14px system-ui, sans-serif";
  paint.fillText(chosenModels().map((model) => model.name).join(", "), 96, 24, width - 108);
  paint.font = "13px system-ui, sans-serif";
  paint.fillText(caption(), 96, 44, width - 108);
  const bar = byId("legend-bar");
  paint.drawImage(bar, 96, 60, 180, 10);
  paint.strokeStyle = "#888";
  paint.strokeRect(96, 60, 180, 10);
  paint.font = "11px system-ui, sans-serif";
  paint.fillText(byId("legend-low").textContent, 96, 79);
  paint.textAlign = "right";
  paint.fillText(byId("legend-high").textContent, 276, 79);
}

/** All maps of the view with their words on one white sheet, as a PNG of twice the size on the screen. */
async function saveFigure() {
  const canvases = [...byId("view").querySelectorAll("canvas")];
  if (!canvases.length && byId("view").querySelector(".chart")) {
    for (const [i, picture] of (await pictures(byId("view"))).entries()) save(`attention-${i + 1}.png`, picture);
    return;
  }
  if (!canvases.length) return say("This view has no picture; save its data instead.");
  const texts = [...byId("view").querySelectorAll("h3, th, button small, dt, dd, .panel-title span")];
  const boxes = [...canvases, ...texts].map((one) => one.getBoundingClientRect());
  const [factor, edge, head] = [2, 12, 96];
  const left = Math.min(...boxes.map((box) => box.left)) - edge, top = Math.min(...boxes.map((box) => box.top)) - edge - head;
  const width = Math.max(Math.max(...boxes.map((box) => box.right)) - left + edge, 420);
  const sheet = element("canvas");
  sheet.width = factor * width;
  sheet.height = factor * (Math.max(...boxes.map((box) => box.bottom)) - top + edge);
  const paint = sheet.getContext("2d");
  paint.scale(factor, factor);
  paint.fillStyle = "#fff";
  paint.fillRect(0, 0, sheet.width, sheet.height);
  paintHead(paint, width);
  paint.imageSmoothingEnabled = false;
  for (const text of texts) {
    const [box, style] = [text.getBoundingClientRect(), getComputedStyle(text)];
    const place = { right: box.right, center: (box.left + box.right) / 2 }[style.textAlign] ?? box.left;
    paint.font = `${style.fontWeight} ${style.fontSize} system-ui, sans-serif`;
    paint.textAlign = { right: "right", center: "center" }[style.textAlign] ?? "left";
    paint.fillText(text.firstChild?.textContent ?? "", place - left, (box.top + box.bottom) / 2 - top);
  }
  for (const canvas of canvases) {
    const box = canvas.getBoundingClientRect();
    paint.drawImage(canvas, box.left - left, box.top - top, box.width, box.height);
  }
  sheet.toBlob((blob) => save("attention.png", blob));
}

async function start() {
  try {
    info = await api.info();
  } catch {
    return complain("The explorer does not answer. Is `cumulant explore` still running?");
  }
  goTo(info);
  haveDials(info.dials);
  haveExamples(info.examples);
  makeControls();
  makeExamples(info.examples);
  haveCharts(info.charts, info.charts_need);
  const seesClips = () => ({ some: chosenModels().some((model) => model.times > 1), all: chosenModels().every((model) => model.times > 1) });
  sendAgain = makeUpload(info.limits, say, complain, seesClips);
  showControls();
  const update = () => {
    showControls();
    if (state.image) redraw();
  };
  onChange(update);
  window.onpopstate = () => {
    goTo(info);
    update();
  };
  if (state.image) await redraw();
  else say("Upload a picture to begin.");
}

start();
