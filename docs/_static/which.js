// "Which of these do I have": shows the rows whose message is in the text that was pasted, or holds it.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const field = document.getElementById("which");
  const said = document.getElementById("which-said");
  const rows = [...document.querySelectorAll("table.which tr[data-parts]")];
  const plain = (text) => text.replace(/[`'"‘’“”]/g, "'").replace(/[\s│|]+/g, " ").trim().toLowerCase();
  const parts = rows.map((row) => JSON.parse(row.dataset.parts).map(plain));
  const texts = rows.map((row) => plain(row.textContent));

  field.addEventListener("input", () => {
    const pasted = plain(field.value);
    const message = pasted.replace(/^[\w.]*(error|exception|warning): /, "");
    let shown = 0;
    rows.forEach((row, i) => {
      const fits = !pasted || parts[i].every((part) => pasted.includes(part)) || texts[i].includes(message);
      row.hidden = !fits;
      shown += fits;
    });
    if (!pasted) said.textContent = "";
    else if (shown) said.textContent = `${shown} of ${rows.length} messages fit.`;
    else said.textContent = "No message fits. Try fewer words of it, or look by symptom below.";
  });
});
