// The page: reads what there is, keeps controls and state together, redraws what a change touches.
import * as api from "./api.js";
import { drawCharts, haveCharts, pictures } from "./charts.js";
import { compareView, loadPictures } from "./compare_view.js";
import { distanceView } from "./distance_view.js";
import { byId, element, save } from "./dom.js";
import { drawLegend } from "./draw.js";
import { headsView } from "./heads_view.js";
import { lensView, orderName, temperatureOf } from "./lens_view.js";
import { mapsView } from "./maps_view.js";
import { makeExamples, makeUpload, showBoard, showPredictions } from "./picture.js";
import { onChange, restore, set, state } from "./state.js";

const VIEWS = { maps: mapsView, compare: compareView, heads: headsView, distance: distanceView, lens: lensView };
let info, sendAgain, shownData = [], turn = 0;

const say = (text) => (byId("status").textContent = text);
function complain(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

const chosenModels = () => info.models.filter((model) => state.models.includes(model.name));

async function redraw() {
  const mine = ++turn;
  const models = chosenModels();
  const view = byId("view");
  view.setAttribute("aria-busy", "true");
  byId("problem").hidden = true;
  const began = performance.now();
  try {
    showBoard(models[0]);
    if (state.view === "compare" || state.view === "lens")
      await Promise.all(models.map(loadPictures));
    const [{ node, data }] = await Promise.all([VIEWS[state.view](models), showPredictions(models)]);
    if (mine !== turn) return;
    const kept = focusKey();
    view.replaceChildren(node);
    if (kept) view.querySelector(kept)?.focus();
    shownData = data;
    drawCharts(view);
    view.dataset.milliseconds = Math.round(performance.now() - began);
  } catch (error) {
    if (mine !== turn) return;
    if (error.kind === "unknown_image" && state.image.startsWith("upload-")) {
      say("The server has let go of the picture; sending it again.");
      sendAgain();
    } else complain(error.kind ? error.message : "The explorer does not answer. Is `cumulant explore` still running?");
  } finally {
    if (mine === turn) view.setAttribute("aria-busy", "false");
  }
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
  for (const input of document.querySelectorAll("#models input")) input.checked = state.models.includes(input.value);
  for (const name of ["sign", "scale"]) for (const input of document.querySelectorAll(`input[name=${name}]`)) input.checked = input.value === state[name];
  const models = chosenModels();
  range("layer", Math.max(...models.map((m) => m.layers)), state.layer + 1);
  range("head", Math.max(...models.map((m) => m.heads)), state.head + 1);
  range("threshold", 90, state.threshold, `${state.threshold} %`);
  range("behind", 100, state.behind, `${state.behind} %`);
  range("order", 30, state.order, orderName(state.order));
  range("temperature", 20, state.temperature, `× ${temperatureOf(state.temperature).toFixed(2)}`);
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
  const number = (id, key, shift = 0) => (byId(id).oninput = (event) => set({ [key]: +event.target.value - shift }));
  number("layer", "layer", 1);
  number("head", "head", 1);
  for (const id of ["threshold", "behind", "temperature", "order"]) number(id, id);
  byId("watch").onclick = watch;
  for (const name of ["sign", "scale"]) byId(name).onchange = (event) => set({ [name]: event.target.value });
  byId("class-token").onclick = () => set({ token: !state.token });
  byId("all-on").onclick = () => set({ off: {} });
  const tabs = Object.keys(VIEWS);
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
  const [factor, edge] = [2, 12];
  const left = Math.min(...boxes.map((box) => box.left)) - edge, top = Math.min(...boxes.map((box) => box.top)) - edge;
  const sheet = element("canvas");
  sheet.width = factor * (Math.max(...boxes.map((box) => box.right)) - left + edge);
  sheet.height = factor * (Math.max(...boxes.map((box) => box.bottom)) - top + edge);
  const paint = sheet.getContext("2d");
  paint.scale(factor, factor);
  paint.fillStyle = "#fff";
  paint.fillRect(0, 0, sheet.width, sheet.height);
  paint.imageSmoothingEnabled = false;
  paint.fillStyle = "#171c26";
  paint.textBaseline = "middle";
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
  restore(location.hash.slice(1), info);
  if (!state.models.length) state.models = info.models.slice(0, 4).map((model) => model.name);
  if (!state.image && info.examples.length) state.image = info.examples[Math.min(3, info.examples.length - 1)].image;
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
  window.onhashchange = () => location.reload();
  if (state.image) await redraw();
  else say("Upload a picture to begin.");
}

start();
