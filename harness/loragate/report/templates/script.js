"use strict";
document.documentElement.classList.add("js");

async function copy(text) {
  // a page opened from a file has no clipboard in every browser
  if (navigator.clipboard && window.isSecureContext) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    await copy(button.previousElementSibling.textContent);
    button.textContent = "copied";
    button.classList.add("done");
    setTimeout(() => { button.textContent = "copy"; button.classList.remove("done"); }, 1500);
  });
}

function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target) target.scrollIntoView();
}
window.addEventListener("hashchange", unfold);
unfold();

const readout = document.getElementById("readout");
for (const heat of document.querySelectorAll(".heat")) {
  heat.addEventListener("pointerover", (event) => {
    const run = event.target.closest("[data-run]");
    if (!run) return;
    const title = event.target.querySelector("title");
    readout.textContent = (title ? title.textContent + " - " : "") + run.dataset.run;
  });
}

const filter = document.getElementById("filter");
if (filter) {
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const row of document.getElementById("all").rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
}
