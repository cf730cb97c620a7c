// Heat and waiting: where tiles were built lately, and where tiles wait for their build. Asked for only while shown.

import { $, NOTHING, boxText, count, element, fetchJson, viewBox } from './dom.js';

const EVERY_MS = 3000;
const HEAT = ['#fbd9a0', '#f6ab5e', '#e8703a', '#c33a2c', '#7d1631'];
const STEPS = [2, 3, 5, 10, 20, 50, 100]; // from one class to the next, the smallest that five classes get by with
const AGES = [['under 10 s', 0, '#8bc4a1'], ['10 s to 1 min', 10, '#e7c14a'], ['1 to 15 min', 60, '#e58a2b'], ['over 15 min', 900, '#c2293f']];

const tiles = (number) => (number === 1 ? '1 tile' : `${count(number)} tiles`);
const clock = (ms) => new Date(ms).toLocaleTimeString('en-GB', { hour: '2-digit', minute: '2-digit' });
const says = (id, text) => { $(id).textContent = text; $(id).hidden = !text; };

export function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

/** Lower ends of five classes of counts up to a highest one. */
export function classes(highest) {
  const step = STEPS.find((one) => one ** 4 * one > highest) ?? STEPS.at(-1);
  return HEAT.map((_, at) => step ** at).filter((low, at) => at === 0 || low <= highest);
}

/** Ask for a collection while its switch is on and the page is seen: now, when the map has moved, and every few seconds. */
function whileShown(map, name, path, draw) {
  let timer = 0, turn = 0;
  const on = () => $(`${name}-toggle`).checked;
  const look = async () => {
    clearTimeout(timer);
    const mine = ++turn;
    if (!on()) { draw(null); return; }
    if (!document.hidden) {
      let found = null;
      const asked = path(`bbox=${boxText(viewBox(map, 0.1))}&zoom=${Math.max(0, Math.min(22, Math.floor(map.getZoom())))}`);
      try { found = await fetchJson(asked); } catch (error) { console.warn(error); }
      if (mine !== turn) return; // the view moved on, or the switch did
      if (found) draw(found); else says(`${name}-empty`, 'No answer now; asking again.');
    }
    timer = setTimeout(look, EVERY_MS);
  };
  $(`${name}-toggle`).addEventListener('change', look);
  document.addEventListener('visibilitychange', () => on() && !document.hidden && look());
  map.on('moveend', () => { if (on()) { clearTimeout(timer); timer = setTimeout(look, 150); } });
  if (on()) look();
  return look;
}

/** What the pointer rests on, or a finger touches, said in a small popup. */
function onHover(map, Popup, layer, text) {
  const popup = new Popup({ closeButton: false, closeOnClick: false, className: 'hover', offset: 8, maxWidth: '260px' });
  const show = (event) => popup.setLngLat(event.lngLat).setDOMContent(text(event.features[0].properties)).addTo(map);
  map.on('mousemove', layer, show);
  map.on('click', (event) => { // a finger's way
    const [feature] = map.queryRenderedFeatures(event.point, { layers: [layer] });
    if (feature) show({ lngLat: event.lngLat, features: [feature] }); else popup.remove();
  });
  // A finger leaves nothing: what it touched is told until the next touch, though the browser makes mouse events of it and
  // then takes the mouse back to where it rests. Where a mouse moves over the map again, its place counts.
  let finger = false;
  map.getCanvas().addEventListener('pointerdown', (event) => { finger = event.pointerType !== 'mouse'; });
  map.getCanvas().addEventListener('pointermove', (event) => {
    if (!finger || event.pointerType !== 'mouse') return;
    finger = false;
    popup.remove();
  });
  map.on('mouseleave', layer, () => finger || popup.remove());
  return () => popup.remove();
}

export function showHeat(map, Popup) {
  const below = 'flash-fill'; // what happens now stays on top
  map.addSource('heat', { type: 'geojson', data: NOTHING });
  map.addLayer({ id: 'heat-fill', type: 'fill', source: 'heat', paint: { 'fill-color': HEAT[0], 'fill-opacity': 0.55 } }, below);
  map.addLayer({ id: 'heat-edge', type: 'line', source: 'heat', paint: { 'line-color': '#fff', 'line-width': 1, 'line-opacity': 0.8 } }, below);
  const gone = onHover(map, Popup, 'heat-fill', ({ cell, tiles: number }) => element('div', {},
    element('b', { textContent: `${tiles(number)} built` }), element('small', { textContent: `H3 cell ${cell}` })));
  const look = whileShown(map, 'heat', (asked) => `heat.geojson?${asked}&minutes=${$('heat-minutes').value}`, (found) => {
    $('heat-minutes').hidden = !found;
    $('heat-legend').hidden = !found?.features.length;
    if (!found) gone();
    map.getSource('heat').setData(found ?? NOTHING);
    if (!found) { says('heat-empty', ''); return; }
    const highest = Math.max(1, ...found.features.map((feature) => feature.properties.tiles)), lows = classes(highest);
    map.setPaintProperty('heat-fill', 'fill-color', lows.length === 1 ? HEAT[0] : ['step', ['get', 'tiles'], HEAT[0], ...lows.slice(1).flatMap((low, at) => [low, HEAT[at + 1]])]);
    $('heat-legend').replaceChildren(...lows.map((low, at) => {
      const high = at + 1 < lows.length ? lows[at + 1] - 1 : highest;
      const cells = found.features.filter(({ properties: { tiles: number } }) => number >= low && number <= high).length;
      return element('li', {}, element('i', { className: `heat-${at}` }), low === high ? tiles(low) : `${count(low)}–${count(high)} tiles`,
        element('b', { textContent: cells === 1 ? '1 cell' : `${count(cells)} cells` }));
    }));
    const window = found.complete ? `in the last ${found.minutes === 60 ? 'hour' : `${found.minutes} min`}` : `since ${clock(found.since_ms)}`;
    const notes = [found.features.length ? `Built ${window}.` : found.tiles ? `Nothing was built in view ${window}.` : `Nothing was built ${window}.`];
    if (found.wider) notes.push(`${count(found.wider)} of ${tiles(found.tiles)} are wider than a cell.`);
    if (found.matched > found.returned) notes.push(`Shown are the hottest ${count(found.returned)} of ${count(found.matched)} cells.`);
    says('heat-empty', notes.join(' '));
  });
  $('heat-minutes').addEventListener('change', look);
}

export function showWaiting(map, Popup) {
  const below = 'flash-fill';
  const colour = ['step', ['get', 'age_s'], AGES[0][2], ...AGES.slice(1).flatMap(([, from, value]) => [from, value])];
  map.addSource('waiting', { type: 'geojson', data: NOTHING });
  // Boxes of wider tiles lie around the others: as lines, or they would hide them.
  map.addLayer({ id: 'waiting-fill', type: 'fill', source: 'waiting', paint: { 'fill-color': colour, 'fill-opacity': ['case', ['get', 'deep'], 0.38, 0] } }, below);
  map.addLayer({ id: 'waiting-edge', type: 'line', source: 'waiting', paint: { 'line-color': colour, 'line-width': ['case', ['get', 'deep'], 1.2, 2.4], 'line-opacity': ['case', ['get', 'deep'], 1, 0.6] } }, below);
  const gone = onHover(map, Popup, 'waiting-fill', ({ prefix, tiles: number, age_s: age, min_zoom: low, max_zoom: high }) => element('div', {},
    element('b', { textContent: `${tiles(number)} ${number === 1 ? 'waits' : 'wait'}, the oldest ${ago(age)}` }),
    element('small', { textContent: `zoom ${low === high ? low : `${low}–${high}`} · prefix ${prefix || 'none'}` })));
  whileShown(map, 'waiting', (asked) => `waiting.geojson?${asked}`, (found) => {
    if (!found) gone();
    $('waiting-legend').hidden = !found?.features.length;
    $('waiting-count').textContent = found ? tiles(found.tiles) : '';
    if (!found) { map.getSource('waiting').setData(NOTHING); says('waiting-empty', ''); return; }
    for (const { properties } of found.features) properties.deep = properties.depth === found.depth;
    found.features.sort((a, b) => a.properties.depth - b.properties.depth); // the smaller box lies on top
    map.getSource('waiting').setData(found);
    const sums = AGES.map(([, from], at) => found.features.reduce((sum, { properties: { age_s: age, tiles: number } }) => sum + (age >= from && !(age >= AGES[at + 1]?.[1]) ? number : 0), 0));
    $('waiting-legend').replaceChildren(...AGES.map(([words], at) => element('li', {}, element('i', { className: `waiting-${at}` }), words, element('b', { textContent: count(sums[at]) }))));
    const notes = [];
    if (!found.tiles) notes.push('Nothing waits: the map is up to date.');
    else if (!found.features.length) notes.push(found.wider ? 'Nothing that fits into the view waits.' : `Nothing waits in view; elsewhere the oldest waits ${ago(found.age_s)}.`);
    if (found.wider) notes.push(`Around the view ${found.wider === 1 ? '1 wider tile waits' : `${count(found.wider)} wider tiles wait`}, the oldest ${ago(found.wider_age_s)}.`);
    if (found.matched > found.returned) notes.push(`Shown are the ${count(found.returned)} of ${count(found.matched)} boxes that wait the longest.`);
    says('waiting-empty', notes.join(' '));
  });
}
