// Drawing signed maps on canvases.
import { css, diverging } from "./colour.js";

/** The patch part of a row of weights, with only the sign that is shown. */
export function shownWeights(weights, prefix, sign) {
  const patches = weights.slice(prefix);
  if (sign === "positive") return patches.map((w) => Math.max(w, 0));
  if (sign === "negative") return patches.map((w) => Math.min(w, 0));
  return patches;
}

export const largest = (weights) => weights.reduce((most, w) => Math.max(most, Math.abs(w)), 0);

/** Where the frames of a clip lie on a canvas about `side` wide, `across` in a line; a picture is a clip of one. */
export function sheet(model, side) {
  const [rows, cols] = model.grid;
  const across = framesAcross(model.times);
  const cell = Math.max(2, Math.ceil(side / Math.max(rows, across * cols)));
  const gap = model.times > 1 ? Math.max(3, Math.round(cell * Math.min(cols, 6) * 0.06)) : 0;
  const [width, height] = [cols * cell + gap, rows * cell + gap];
  return {
    rows, cols, cell,
    width: across * width - gap, height: Math.ceil(model.times / across) * height - gap,
    corner: (time) => [(time % across) * width, Math.floor(time / across) * height],
  };
}

/** The number of frames in a line that fills a rectangle not much wider than high. */
function framesAcross(times) {
  const root = Math.sqrt(times);
  for (let n = Math.ceil(root); n <= 2 * root; n++) if (times % n === 0) return n;
  return Math.ceil(root);
}

/** The patch of a clip or picture under the pointer on a canvas that `drawMap` drew. */
export function placeAt(event, canvas, model, side) {
  const at = sheet(model, side);
  const box = canvas.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * at.width, y = ((event.clientY - box.top) / box.height) * at.height;
  let best = { time: 0, row: 0, col: 0 }, least = Infinity;
  for (let time = 0; time < model.times; time++) {
    const [left, top] = at.corner(time);
    const col = Math.min(Math.max(Math.floor((x - left) / at.cell), 0), at.cols - 1);
    const row = Math.min(Math.max(Math.floor((y - top) / at.cell), 0), at.rows - 1);
    const away = Math.hypot(x - left - (col + 0.5) * at.cell, y - top - (row + 0.5) * at.cell);
    if (away < least) [best, least] = [{ time, row, col }, away];
  }
  return best;
}

/**
 * Draw weights (one per patch) on a canvas. `top` is the weight of full colour; weights below `threshold` (a share of
 * it) are left white; `query` {time, row, col} gets a frame; `pictures`, one for each step in time, lie behind as light
 * grey, as strong as `behind`.
 */
export function drawMap(canvas, { weights, model, top, threshold = 0, query, pictures = [], behind = 0, side }) {
  const at = sheet(model, side);
  canvas.width = at.width;
  canvas.height = at.height;
  const paint = canvas.getContext("2d");
  for (let time = 0; time < model.times; time++) {
    const part = weights.slice(time * at.rows * at.cols, (time + 1) * at.rows * at.cols);
    paint.save();
    paint.translate(...at.corner(time));
    drawFrame(paint, part, { ...at, top, threshold, behind, picture: pictures[time] });
    if (model.times > 1 && at.cols * at.cell > 90) label(paint, `${time + 1}`);
    if (query && query.time === time) frame(paint, query.col * at.cell, query.row * at.cell, at.cell);
    paint.restore();
  }
}

/** The number of a frame, in its corner. */
function label(paint, text) {
  paint.font = "600 11px system-ui, sans-serif";
  paint.fillStyle = "rgb(255 255 255 / .75)";
  paint.fillRect(0, 0, 7 + 7 * text.length, 15);
  paint.fillStyle = "#171c26";
  paint.fillText(text, 4, 11);
}

function drawFrame(paint, weights, { rows, cols, cell, top, threshold, picture, behind }) {
  paint.fillStyle = "#fff";
  paint.fillRect(0, 0, cols * cell, rows * cell);
  if (picture && behind) {
    paint.globalAlpha = 0.8 * behind;
    paint.imageSmoothingEnabled = picture.naturalWidth > 32;
    // Multiplying by a dark picture would drown the colours: it lies behind with light and dark exchanged.
    paint.filter = isDark(picture) ? "grayscale(1) invert(1)" : "grayscale(1)";
    paint.drawImage(picture, 0, 0, cols * cell, rows * cell);
    paint.filter = "none";
    paint.globalAlpha = 1;
    paint.globalCompositeOperation = "multiply";
  }
  weights.forEach((w, i) => {
    const t = top > 0 ? w / top : 0;
    const [x, y] = [(i % cols) * cell, Math.floor(i / cols) * cell];
    paint.fillStyle = css(Math.abs(t) < threshold ? [247, 247, 247] : diverging(t));
    paint.fillRect(x, y, cell, cell);
  });
  paint.globalCompositeOperation = "source-over";
  if (cell >= 28) signs(paint, weights, { cols, cell, top, threshold });
}

const darkness = new WeakMap();

function isDark(picture) {
  if (!darkness.has(picture)) {
    const probe = document.createElement("canvas");
    probe.width = probe.height = 8;
    const paint = probe.getContext("2d");
    paint.drawImage(picture, 0, 0, 8, 8);
    const bytes = paint.getImageData(0, 0, 8, 8).data;
    darkness.set(picture, bytes.reduce((sum, byte, i) => sum + (i % 4 < 3 ? byte : 0), 0) / (3 * 64) < 110);
  }
  return darkness.get(picture);
}

/** A small minus on cells that are clearly negative, so that the sign does not rest on colour alone. */
function signs(paint, weights, { cols, cell, top, threshold }) {
  weights.forEach((w, i) => {
    const t = top > 0 ? w / top : 0;
    if (t > -Math.max(0.06, threshold)) return;
    paint.fillStyle = t < -0.55 ? "#fff" : "#053061";
    const [x, y] = [(i % cols) * cell, Math.floor(i / cols) * cell];
    paint.fillRect(x + cell * 0.36, y + cell * 0.47, cell * 0.28, Math.max(2, cell * 0.06));
  });
}

function frame(paint, x, y, cell) {
  const width = Math.max(1.5, cell / 14);
  paint.lineWidth = width;
  paint.strokeStyle = "#fff";
  paint.strokeRect(x + width * 1.5, y + width * 1.5, cell - 3 * width, cell - 3 * width);
  paint.lineWidth = width;
  paint.strokeStyle = "#d40f6d";
  paint.strokeRect(x + width / 2, y + width / 2, cell - width, cell - width);
}

export function drawLegend(canvas, threshold, sign) {
  const paint = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    const t = (2 * x) / (canvas.width - 1) - 1;
    const hidden = Math.abs(t) < threshold || (sign === "positive" && t < 0) || (sign === "negative" && t > 0);
    paint.fillStyle = css(hidden ? [247, 247, 247] : diverging(t));
    paint.fillRect(x, 0, 1, canvas.height);
  }
}
