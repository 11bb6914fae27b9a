// The chosen theme is set before anything is drawn; without storage it lasts as long as the page.
const root = document.documentElement;
root.classList.add("js");
// In a browser too old for the rest, the page is what it would be without a script.
addEventListener("error", () => root.classList.remove("js"));
let stored = "";
try { stored = localStorage.getItem("parity-theme") || ""; } catch { /* storage is not for every page */ }
if (stored === "light" || stored === "dark") root.dataset.theme = stored;
