// Before the first paint: the theme that was chosen here the last time.
"use strict";
try {
  const chosen = localStorage.getItem("atoll-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch { /* storage is off: the system's theme it is */ }
