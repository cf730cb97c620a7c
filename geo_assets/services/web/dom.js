// Small things that every part of the page needs. All text from data goes in as text.

export const NOTHING = { type: 'FeatureCollection', features: [] };

export const $ = (id) => document.getElementById(id);
export const here = (path) => new URL(path, document.baseURI).href;

export async function fetchJson(path) {
  const answer = await fetch(here(path));
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

/** A popup's content: a title, what kind of thing it is, rows of names and values, and what stands below. */
export function card(title, kind, rows, ...below) {
  const list = element('dl');
  for (const [name, value] of Object.entries(rows)) {
    if (value === null || value === undefined || value === '') continue;
    list.append(element('dt', { textContent: name }), element('dd', { textContent: String(value) }));
  }
  return element('div', { className: 'popup' },
    element('h3', { textContent: title }), element('p', { className: 'kind', textContent: kind }), list, ...below);
}

/** The view's box as west, south, east, north in degrees, grown by a fraction of its sides; the world where it is wider. */
export function viewBox(map, grown = 0) {
  const bounds = map.getBounds();
  const width = (bounds.getEast() - bounds.getWest()) * grown, height = (bounds.getNorth() - bounds.getSouth()) * grown;
  const west = bounds.getWest() - width, east = bounds.getEast() + width, whole = east - west >= 360;
  const wrap = (lng) => ((((lng + 180) % 360) + 360) % 360) - 180;
  return [whole ? -180 : wrap(west), Math.max(-90, bounds.getSouth() - height), whole ? 180 : wrap(east), Math.min(90, bounds.getNorth() + height)];
}

export const boxText = (box) => box.map((value) => value.toFixed(7)).join(',');

/** Whether a box lies within another; west may be above east. */
export function within([west, south, east, north], [outerWest, outerSouth, outerEast, outerNorth]) {
  if (south < outerSouth || north > outerNorth) return false;
  const from = (lng) => (((lng - outerWest) % 360) + 360) % 360;
  const width = outerEast - outerWest >= 360 ? 360 : from(outerEast);
  return width >= 360 || (from(west) <= from(east) && from(east) <= width);
}

export const count = (number) => number.toLocaleString('en');
