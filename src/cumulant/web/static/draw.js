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

/**
 * Draw weights (one per patch) on a canvas. `top` is the weight of full colour; weights below `threshold` (a share of
 * it) are left white; `query` [row, col] gets a frame; `picture` lies behind as light grey, as strong as `behind`.
 */
export function drawMap(canvas, { weights, grid: [rows, cols], top, threshold = 0, query, picture, behind = 0, side }) {
  const cell = Math.max(2, Math.ceil(side / Math.max(rows, cols)));
  canvas.width = cols * cell;
  canvas.height = rows * cell;
  const paint = canvas.getContext("2d");
  paint.fillStyle = "#fff";
  paint.fillRect(0, 0, canvas.width, canvas.height);
  if (picture && behind) {
    paint.globalAlpha = 0.8 * behind;
    paint.imageSmoothingEnabled = picture.naturalWidth > 32;
    // Multiplying by a dark picture would drown the colours: it lies behind with light and dark exchanged.
    paint.filter = isDark(picture) ? "grayscale(1) invert(1)" : "grayscale(1)";
    paint.drawImage(picture, 0, 0, canvas.width, canvas.height);
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
  if (query) frame(paint, query[1] * cell, query[0] * cell, cell);
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
