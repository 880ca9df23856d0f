// "Find your defect": shows the rows whose message is in the text that was pasted, or holds a piece of it.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("defect");
  const said = document.getElementById("defect-said");
  const RUN = 5; // words in a row, as in patches/symptoms.py
  const plain = (text) => text.replace(/[`'"‘’“”]/g, "'").replace(/[\s│|]+/g, " ").trim().toLowerCase();
  const runs = (text) => {
    const words = text.split(" ");
    return words.slice(RUN - 1).map((_, i) => ` ${words.slice(i, i + RUN).join(" ")} `);
  };
  const rows = [...document.querySelectorAll("table.defects tr[data-parts], table.defects tr[data-any]")].map((row) => ({
    row,
    parts: JSON.parse(row.dataset.parts ?? "[]").map(plain),
    any: JSON.parse(row.dataset.any ?? "[]").map(plain),
    runs: row.dataset.parts ? runs(plain(row.cells[0].textContent)) : [],
    text: plain(row.textContent),
  }));
  const fits = (each, pasted, message) =>
    (each.parts.length > 0 && each.parts.every((part) => pasted.includes(part))) ||
    each.any.some((words) => ` ${pasted}`.includes(` ${words}`)) ||
    each.runs.some((run) => ` ${pasted} `.includes(run)) ||
    each.text.includes(message);

  field.addEventListener("input", () => {
    const pasted = plain(field.value);
    const message = pasted.replace(/^[\w.]*(error|exception|warning): /, "");
    let shown = 0;
    for (const each of rows) {
      const found = !pasted || fits(each, pasted, message);
      each.row.hidden = !found;
      shown += found;
    }
    if (!pasted) said.textContent = "";
    else if (shown) said.textContent = `${shown} of ${rows.length} rows fit.`;
    else said.textContent = "No message fits. Try fewer words of it, or look by symptom below.";
  });
});
