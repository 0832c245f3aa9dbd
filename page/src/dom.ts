// Elements from data. Text becomes text nodes only: names and messages of a run may come from anybody.

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | undefined | ((event: Event) => void)>;

function fill<T extends Element>(element: T, attributes: Attributes, children: Child[]): T {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== undefined && value !== false) element.setAttribute(name, String(value));
  }
  for (const child of children) {
    if (child !== null && child !== undefined && child !== false) {
      element.append(typeof child === "number" ? String(child) : child);
    }
  }
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(tag), attributes, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** Replace the children of an element. */
export function show(element: Element, ...children: Child[]): void {
  const nodes = children.filter((child) => child !== null && child !== undefined && child !== false);
  element.replaceChildren(...nodes.map((child) => (typeof child === "number" ? String(child) : (child as Node | string))));
}

export function theme(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const isDark = (): boolean => matchMedia("(prefers-color-scheme: dark)").matches;

/** A colour of `plan --plot`; on a dark background, dark colours are lightened. */
export function shade(colour: string): string {
  if (!isDark()) return colour;
  const rgb = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16) / 255) as [number, number, number];
  const luminance = 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2];
  const white = Math.max(0, 0.34 - luminance) * 1.3;
  return `rgb(${rgb.map((part) => Math.round(255 * (part + (1 - part) * white))).join(" ")})`;
}

/** Black or white, whichever is readable on a colour. */
export function inkOn(colour: string): string {
  const parts = colour.startsWith("#")
    ? [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16))
    : (colour.match(/\d+/g) ?? []).map(Number);
  const luminance = 0.2126 * (parts[0] ?? 0) + 0.7152 * (parts[1] ?? 0) + 0.0722 * (parts[2] ?? 0);
  return luminance > 140 ? "#1a1d21" : "#ffffff";
}

/** Names with their colours. */
export function legend(names: [string, string][]): HTMLElement {
  const chip = (colour: string): SVGSVGElement =>
    svg("svg", { class: "chip", viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, fill: colour }));
  return h("p", { class: "legend" }, ...names.map(([name, colour]) => h("span", {}, chip(colour), name)));
}
