// Addresses inside the page, copying, the theme, and printing.
const go = async () => {
  const hash = location.hash.slice(1);
  if (!hash) return;
  if (hash.includes("=")) {
    const found = new URLSearchParams(hash);
    narrow(found);
    const one = byAnchor.get(found.get("case"));
    if (one) await reveal(one);
    else document.getElementById("cases").scrollIntoView();
    return;
  }
  let name = hash;
  try { name = decodeURIComponent(hash); } catch { /* taken as it stands */ }
  const one = byAnchor.get(name);
  if (one) { await reveal(one); return; }
  const target = document.getElementById(name);
  const around = target?.closest("details");
  if (around) { around.open = true; around.scrollIntoView(); around.querySelector("summary").focus({ preventScroll: true }); }
};
addEventListener("hashchange", go);
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  // A link to where the address already points changes nothing, and is meant all the same.
  if (link && !event.defaultPrevented && link.getAttribute("href") === location.hash) go();
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const code = button.parentElement.querySelector("code");
  let done = true;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});

const theme = document.getElementById("theme");
const THEMES = { "": "as the system", light: "light", dark: "dark" };
const nameTheme = () => { theme.textContent = `Theme: ${THEMES[document.documentElement.dataset.theme ?? ""]}`; };
theme.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (next) document.documentElement.dataset.theme = next;
  else delete document.documentElement.dataset.theme;
  try { localStorage.setItem("parity-theme", next); } catch { /* lasts as long as the page */ }
  nameTheme();
});
nameTheme();

// Paper has no "show more".
let before = PAGE;
addEventListener("beforeprint", () => { before = limit; limit = Math.max(limit, 2000); show(); });
addEventListener("afterprint", () => { limit = before; show(); });

document.querySelectorAll(".panel").forEach(preparePanel);
show();
body.classList.add("ready");
go();
