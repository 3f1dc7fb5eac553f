// Formulas are set in the browser by the copy of MathJax (Apache-2.0) beside this file: the site needs no network.
window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex" },
};
