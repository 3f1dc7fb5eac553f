// A figure opens by itself when it is clicked: on a phone that is the way to read its small print.
// Cells that hold a sentence, or a few words, are marked, so that a phone and a wide table give them room (extra.css).
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "open this figure alone";
    image.replaceWith(link);
    link.append(image);
  }
  for (const cell of document.querySelectorAll("article td")) {
    if (cell.textContent.length > 60) cell.classList.add("sentence");
    if (cell.textContent.trim().split(" ").length > 3) cell.classList.add("words");
  }
});
