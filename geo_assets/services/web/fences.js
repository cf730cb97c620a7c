// The standing fences on the map: as they judge positions, lit for a moment when a trigger fires.

import { $, NOTHING, boxText, card, count, element, fetchJson, viewBox, within } from './dom.js';

export const FENCE = '#7048c8', LIT = '#e8590c';
const PULSE = [1, 0.85, 0.65, 0.45, 0.25, 0.1, 0]; // every 160 ms
const MOST_PULSES = 24; // at once: each is a new frame of the map, and more would say nothing

/** The fences' layers and what is known of those in view. */
export function showFences(map, { onChange }) {
  const lit = new Map(); // key -> step of its pulse
  let box = null, revision = -1, wanted = 0, turn = 0, grid = null, byKey = new Map(), pulsing = 0;

  const state = ['coalesce', ['feature-state', 'lit'], 0];
  const colour = ['interpolate', ['linear'], state, 0, FENCE, 1, LIT];
  map.addSource('geofences', { type: 'geojson', data: NOTHING, promoteId: 'key' });
  map.addLayer({ id: 'geofences-fill', type: 'fill', source: 'geofences',
    paint: { 'fill-color': colour, 'fill-opacity': ['+', 0.09, ['*', 0.34, state]] } });
  map.addLayer({ id: 'geofences-edge', type: 'line', source: 'geofences', layout: { 'line-join': 'round' },
    paint: { 'line-color': colour, 'line-width': ['+', 1.6, ['*', 2.4, state]], 'line-opacity': 0.9 } });
  map.addLayer({ id: 'geofences-label', type: 'symbol', source: 'geofences', minzoom: 12,
    layout: { 'text-field': ['get', 'name'], 'text-font': ['sans-serif'], 'text-size': 12, 'text-padding': 4 },
    paint: { 'text-color': '#4c2a99', 'text-halo-color': 'rgba(255,255,255,0.92)', 'text-halo-width': 1.6 } });

  async function load() {
    const mine = ++turn, around = viewBox(map, 0.4);
    let found;
    try { found = await fetchJson(`fences.geojson?bbox=${boxText(around)}`); } catch (error) { console.warn(error); return; }
    if (mine !== turn) return; // a newer one is under way
    const whole = found.matched === found.returned;
    box = whole ? around : null; // of those that were left out, some are asked for with every move
    if (found.revision !== revision || !whole || found.features.length !== byKey.size || found.features.some((f) => !byKey.has(f.id))) {
      byKey = new Map(found.features.map((feature) => [feature.id, feature]));
      grid = gridOf(found.features);
      map.getSource('geofences').setData({ type: 'FeatureCollection', features: found.features });
    }
    revision = found.revision;
    $('fences-count').textContent = whole ? count(found.total) : `${count(found.returned)} of ${count(found.matched)} in view`;
    $('fences-empty').hidden = found.total > 0;
    onChange(byKey);
    if (revision < wanted) setTimeout(load, 300); // an older answer than what was told
  }
  let timer = 0;
  map.on('moveend', () => {
    if (box && within(viewBox(map), box)) return;
    clearTimeout(timer);
    timer = setTimeout(load, 150);
  });

  const step = () => {
    for (const [key, at] of lit) {
      map.setFeatureState({ source: 'geofences', id: key }, { lit: PULSE[at] });
      if (at + 1 < PULSE.length) lit.set(key, at + 1); else lit.delete(key);
    }
    if (!lit.size) { clearInterval(pulsing); pulsing = 0; }
  };

  load();
  return {
    changed(told) { wanted = told.revision; if (told.revision !== revision) load(); },
    reload: load,
    at: (lng, lat) => (grid ? grid(lng, lat) : []),
    get: (key) => byKey.get(key),
    pulse(key) {
      if (!byKey.has(key) || lit.size >= MOST_PULSES) return;
      lit.set(key, 0);
      step();
      pulsing ||= setInterval(step, 160);
    },
    show(on) { for (const part of ['fill', 'edge', 'label']) map.setLayoutProperty(`geofences-${part}`, 'visibility', on ? 'visible' : 'none'); },
  };
}

/** What a popup says of a fence; `edit` is offered where it may be changed here. */
export function fenceCard(feature, { draws, drawSource, onEdit }) {
  const { name, key, source, id, revision, priority, dwell_s: dwell, hysteresis_m: hysteresis, schedule, editable } = feature.properties;
  const rows = { id, source, priority: priority || null, dwell: dwell ? `${dwell} s` : null,
    hysteresis: hysteresis ? `${hysteresis} m` : null, schedule: schedule ? `${schedule.windows.join(', ')} (${schedule.zone})` : null, version: revision };
  const below = element('div', { className: 'links' });
  if (editable) {
    const button = element('button', { type: 'button', className: 'quiet', textContent: 'Change or delete' });
    button.addEventListener('click', () => onEdit(feature));
    below.append(button);
  } else if (draws) below.append(element('span', { textContent: `Only fences of ${drawSource} can be changed here.` }));
  return card(name || key, 'fence', rows, ...(below.childNodes.length ? [below] : []));
}

export function boundsOfFence(feature) {
  let west = Infinity, south = Infinity, east = -Infinity, north = -Infinity;
  for (const [ring] of partsOf(feature)) {
    for (const [x, y] of ring) { west = Math.min(west, x); east = Math.max(east, x); south = Math.min(south, y); north = Math.max(north, y); }
  }
  return [[west, south], [east, north]];
}

const partsOf = ({ geometry }) => (geometry.type === 'Polygon' ? [geometry.coordinates] : geometry.coordinates);

/** A function from a place to the keys of the fences that cover it, by a grid over all of them. */
function gridOf(features) {
  if (!features.length) return () => [];
  const parts = [];
  for (const feature of features) {
    for (const rings of partsOf(feature)) {
      let west = Infinity, south = Infinity, east = -Infinity, north = -Infinity;
      for (const [x, y] of rings[0]) { if (x < west) west = x; if (x > east) east = x; if (y < south) south = y; if (y > north) north = y; }
      parts.push({ key: feature.id, rings, west, south, east, north });
    }
  }
  // Over their middles: one fence that is as wide as a country must not put all others into one cell.
  const middles = (of) => { const all = parts.map(of).sort((a, b) => a - b); return [all[0], all[all.length - 1]]; };
  const [west, east] = middles((part) => (part.west + part.east) / 2), [south, north] = middles((part) => (part.south + part.north) / 2);
  const side = Math.max(8, Math.min(256, Math.ceil(2 * Math.sqrt(parts.length))));
  const wide = (east - west) / side || 1, high = (north - south) / side || 1, cells = new Map(), large = [];
  const column = (lng) => Math.floor((lng - west) / wide), row = (lat) => Math.floor((lat - south) / high);
  for (const part of parts) {
    const [left, right, bottom, top] = [column(part.west), column(part.east), row(part.south), row(part.north)];
    if ((right - left + 1) * (top - bottom + 1) > 400) { large.push(part); continue; }
    for (let x = left; x <= right; x++) for (let y = bottom; y <= top; y++) {
      const cell = x * 65_536 + y;
      if (cells.has(cell)) cells.get(cell).push(part); else cells.set(cell, [part]);
    }
  }
  const covers = (part, lng, lat) => {
    if (lng < part.west || lng > part.east || lat < part.south || lat > part.north) return false;
    let inside = false;
    for (const ring of part.rings) {
      for (let i = 0, j = ring.length - 1; i < ring.length; j = i++) {
        const yi = ring[i][1], yj = ring[j][1], xi = ring[i][0], xj = ring[j][0];
        if (yi > lat !== yj > lat && lng < ((xj - xi) * (lat - yi)) / (yj - yi) + xi) inside = !inside;
      }
    }
    return inside;
  };
  return (lng, lat) => {
    const found = [];
    for (const part of cells.get(column(lng) * 65_536 + row(lat)) ?? []) if (covers(part, lng, lat)) found.push(part.key);
    for (const part of large) if (covers(part, lng, lat)) found.push(part.key);
    return found;
  };
}
