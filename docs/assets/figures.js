// A figure opens by itself when it is clicked: on a phone that is the way to read its small print.
document.addEventListener("DOMContentLoaded", () => {
  for (const image of document.querySelectorAll("article img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.href = image.src;
    link.title = "open this figure alone";
    image.replaceWith(link);
    link.append(image);
  }
});
