// Numbers, times and elements. All text that came over the network becomes a text node, never markup.

export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") node.className = value;
    else if (name in node && name !== "role") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) {
    if (value >= size * 0.99995) return `${(value / size).toPrecision(3)}${unit}`;
  }
  if (value >= 1e5) return `${(value / 1e3).toPrecision(3)}k`;
  return Math.round(value).toLocaleString("en-US");
}

export function bytes(value) {
  let rest = value;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (rest < 999.95) return unit === "B" ? `${Math.round(rest)} B` : `${rest.toFixed(1)} ${unit}`;
    rest /= 1000;
  }
  return `${rest.toFixed(1)} TB`;
}

export const loss = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(100 * value)}%`);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = seconds / 60;
  if (minutes < 90) return `${Math.round(minutes)} min`;
  const hours = minutes / 60;
  if (hours < 36) return `${Math.floor(hours)} h ${Math.round(minutes % 60)} min`;
  const days = hours / 24;
  return days < 1000 ? `${days.toFixed(days < 10 ? 1 : 0)} days` : `${(days / 365.25).toFixed(0)} years`;
}

export function ago(unixSeconds, now) {
  if (unixSeconds === null || unixSeconds === undefined) return "";
  const seconds = Math.max(0, now - unixSeconds);
  return seconds < 5 ? "now" : `${duration(seconds)} ago`;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleString();
export const short = (id) => (id ? `${id.slice(0, 12)}…` : "–");

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
