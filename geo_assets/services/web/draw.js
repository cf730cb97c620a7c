// Drawing fences: an area, a circle or a corridor with the mouse, its numbers in a form, and saving it.

import { $, here } from './dom.js';

const KINDS = { area: 'polygon', circle: 'circle', corridor: 'linestring' };
const HINTS = {
  area: 'Click the corners; click the first one again to close it.',
  circle: 'Click the middle, then the edge.',
  corridor: 'Click along the way; click the last corner again to end it.',
};
const EARTH_M = 6_371_008.8;
const MOST_CORNERS = 200; // of a fence whose corners can still be pulled about one by one
const WAIT_MS = 15_000; // for a saved fence to be in force
const FORCE = '#e8590c';

let library = null;
/** The drawing library is fetched when somebody draws; its modules name each other in a way only bundlers know. */
function load() {
  const script = (path) => new Promise((done, failed) => {
    document.head.append(Object.assign(document.createElement('script'), { src: here(path), onload: done, onerror: () => failed(new Error(`${path} is missing`)) }));
  });
  library ||= script('vendor/terra-draw.js').then(() => script('vendor/terra-draw-maplibre.js')).then(() => ({ ...window.terraDraw, ...window.terraDrawMaplibreGlAdapter }));
  return library;
}

const radians = (degrees) => (degrees * Math.PI) / 180;
function metres([x1, y1], [x2, y2]) {
  const a = Math.sin(radians(y2 - y1) / 2) ** 2 + Math.cos(radians(y1)) * Math.cos(radians(y2)) * Math.sin(radians(x2 - x1) / 2) ** 2;
  return 2 * EARTH_M * Math.asin(Math.sqrt(a));
}
const round9 = (value) => Math.round(value * 1e9) / 1e9;

/** A circle as it is shown while it is drawn; what is saved is its middle and radius. */
function ringAround([lng, lat], radius) {
  const ring = [], angle = radius / EARTH_M, y = radians(lat);
  for (let i = 0; i <= 64; i++) {
    const bearing = (-2 * Math.PI * (i % 64)) / 64;
    const y2 = Math.asin(Math.sin(y) * Math.cos(angle) + Math.cos(y) * Math.sin(angle) * Math.cos(bearing));
    const x2 = radians(lng) + Math.atan2(Math.sin(bearing) * Math.sin(angle) * Math.cos(y), Math.cos(angle) - Math.sin(y) * Math.sin(y2));
    ring.push([round9((x2 * 180) / Math.PI), round9((y2 * 180) / Math.PI)]);
  }
  return ring;
}

function circleOf(ring) {
  const xs = ring.map(([x]) => x), ys = ring.map(([, y]) => y);
  const middle = [(Math.min(...xs) + Math.max(...xs)) / 2, 0];
  // The middle between its north and south lies a little off the middle of the latitudes; both bearings agree on it.
  middle[1] = (Math.min(...ys) + Math.max(...ys)) / 2;
  return { middle, radius: ring.reduce((sum, point) => sum + metres(middle, point), 0) / ring.length };
}

/** The drawing tools; nothing happens before a kind is chosen or a fence is to be changed. */
export function drawing(map, { fences }) {
  const form = $('fence-form');
  let draw = null, kind = null, feature = null, editing = null, touched = false, busy = false, awaited = null;

  const note = (text, good = false) => { const line = $('draw-note'); line.textContent = text; line.className = good ? 'good' : ''; line.hidden = !text; };
  const drawn = () => (feature === null ? null : draw?.getSnapshotFeature(feature));

  async function started() {
    if (draw) return;
    const { TerraDraw, TerraDrawPolygonMode, TerraDrawCircleMode, TerraDrawLineStringMode, TerraDrawSelectMode, TerraDrawMapLibreGLAdapter } = await load();
    const ground = { fillColor: FORCE, fillOpacity: 0.16, outlineColor: FORCE, outlineWidth: 2.5, closingPointColor: '#ffffff', closingPointOutlineColor: FORCE, closingPointWidth: 5, closingPointOutlineWidth: 2 };
    const points = { selectionPointColor: '#ffffff', selectionPointOutlineColor: FORCE, selectionPointWidth: 5, selectionPointOutlineWidth: 2,
      midPointColor: FORCE, midPointOutlineColor: '#ffffff', midPointWidth: 3.5, midPointOutlineWidth: 1 };
    const corners = { feature: { draggable: true, coordinates: { draggable: true, midpoints: true, deletable: true } } };
    draw = new TerraDraw({
      adapter: new TerraDrawMapLibreGLAdapter({ map, coordinatePrecision: 9 }),
      modes: [
        new TerraDrawPolygonMode({ styles: ground }), new TerraDrawCircleMode({ styles: ground, segments: 64 }),
        new TerraDrawLineStringMode({ styles: { lineStringColor: FORCE, lineStringWidth: 3, closingPointColor: '#ffffff', closingPointOutlineColor: FORCE } }),
        new TerraDrawSelectMode({
          allowManualDeselection: false,
          flags: { polygon: corners, linestring: corners, circle: { feature: { draggable: true, coordinates: { resizable: 'center' } } } },
          styles: { selectedPolygonColor: FORCE, selectedPolygonFillOpacity: 0.16, selectedPolygonOutlineColor: FORCE, selectedPolygonOutlineWidth: 2.5,
            selectedLineStringColor: FORCE, selectedLineStringWidth: 3, ...points },
        }),
      ],
    });
    draw.start();
    draw.on('finish', (id) => {
      if (feature !== null) { changed(); return; } // the end of a pull
      feature = id;
      // Not while the library is still ending its own way of drawing.
      setTimeout(() => { draw.setMode('select'); draw.selectFeature(id); changed(); note(''); form.elements.name.focus(); });
    });
    draw.on('change', (ids, type) => { if (feature !== null && ids.includes(feature) && type === 'update') { touched = true; changed(); } });
    map.addSource('draft', { type: 'geojson', data: { type: 'FeatureCollection', features: [] } });
    map.addLayer({ id: 'draft-corridor', type: 'line', source: 'draft', layout: { 'line-cap': 'round', 'line-join': 'round' },
      paint: { 'line-color': FORCE, 'line-opacity': 0.22, 'line-width': 1 } }, 'geofences-label');
  }

  function changed() {
    const shape = drawn();
    if (kind === 'circle' && shape && document.activeElement !== form.elements.radius_m) {
      form.elements.radius_m.value = circleOf(shape.geometry.coordinates[0]).radius.toFixed(1);
    }
    corridor();
    $('fence-save').disabled = busy || (!shape && !editing);
  }

  function corridor() {
    const shape = kind === 'corridor' ? drawn() : null;
    map.getSource('draft')?.setData({ type: 'FeatureCollection', features: shape ? [{ type: 'Feature', properties: {}, geometry: shape.geometry }] : [] });
    if (!shape) return;
    // As wide on the ground at every zoom: 512 pixels are the world's circumference at zoom 0.
    const lat = shape.geometry.coordinates[0][1], pixels = (form.elements.width_m.value * 512) / (2 * Math.PI * 6_378_137 * Math.cos(radians(lat)));
    map.setPaintProperty('draft-corridor', 'line-width', ['interpolate', ['exponential', 2], ['zoom'], 0, pixels, 24, pixels * 2 ** 24]);
  }

  function open(title, values = {}) {
    form.reset();
    fault(null);
    for (const [name, value] of Object.entries(values)) if (form.elements[name]) form.elements[name].value = value ?? '';
    $('fence-title').textContent = title;
    for (const [name, of] of [['radius', 'circle'], ['width', 'corridor']]) $(`${name}-row`).hidden = kind !== of;
    form.hidden = false;
    $('panel').classList.add('editing');
    changed();
  }

  function close() {
    form.hidden = true;
    $('panel').classList.remove('editing');
    if (draw) { draw.setMode('static'); draw.clear(); }
    feature = editing = kind = null;
    touched = false;
    if (draw) corridor();
    for (const button of document.querySelectorAll('[data-draw]')) button.setAttribute('aria-pressed', 'false');
  }

  async function begin(next) {
    try { await started(); } catch (error) { note(`Drawing is not possible: ${error.message}`); return; }
    close();
    note(HINTS[next]);
    kind = next;
    draw.setMode(KINDS[next]);
    document.querySelector(`[data-draw="${next}"]`).setAttribute('aria-pressed', 'true');
    open({ area: 'New area', circle: 'New circle', corridor: 'New corridor' }[next], { width_m: next === 'corridor' ? 40 : '' });
  }

  async function edit(found) {
    try { await started(); } catch (error) { note(`Drawing is not possible: ${error.message}`); return; }
    close();
    editing = found;
    const { name, dwell_s, hysteresis_m, priority } = found.properties;
    const { type, coordinates } = found.geometry;
    if (type === 'Polygon' && coordinates.length === 1 && coordinates[0].length <= MOST_CORNERS) {
      const ring = coordinates[0].map(([x, y]) => [round9(x), round9(y)]);
      const [added] = draw.addFeatures([{ type: 'Feature', properties: { mode: 'polygon' }, geometry: { type, coordinates: [ring] } }]);
      if (added.valid) { feature = added.id; draw.setMode('select'); draw.selectFeature(feature); }
      note('Pull its corners, or change its numbers.');
    } else note('Its numbers can be changed here; its shape is too intricate.');
    touched = false;
    open(name || 'Fence', { name, dwell_s, hysteresis_m, priority: priority || '' });
    $('fence-delete').hidden = false;
  }

  function body(action) {
    const number = (name) => (form.elements[name].value === '' ? undefined : Number(form.elements[name].value));
    const said = { action, name: form.elements.name.value.trim() || undefined, dwell_s: number('dwell_s') || undefined,
      hysteresis_m: number('hysteresis_m'), priority: number('priority'), schedule: editing?.properties.schedule };
    const shape = drawn();
    if (kind === 'circle') {
      said.geometry = { type: 'Point', coordinates: circleOf(shape.geometry.coordinates[0]).middle.map(round9) };
      said.radius_m = number('radius_m');
    } else if (kind === 'corridor') {
      said.geometry = shape.geometry;
      said.width_m = number('width_m');
    } else said.geometry = editing && !touched ? editing.geometry : shape.geometry; // untouched: to the last digit as it is
    // An id may be a number that JavaScript cannot hold: it goes as the text it came as.
    const id = editing ? editing.properties.id : JSON.stringify(`drawn-${Date.now().toString(36)}${Math.floor(Math.random() * 1296).toString(36)}`);
    const rest = JSON.stringify(action === 'delete' ? { action } : said);
    return { id, text: `{"type":"Feature","id":${id},${rest.slice(1)}` };
  }

  function fault(problem) {
    for (const input of form.querySelectorAll('[aria-invalid]')) input.removeAttribute('aria-invalid');
    const line = $('fence-fault');
    line.hidden = !problem;
    if (!problem) return;
    const input = form.elements[problem.field?.replace('properties.', '')];
    input?.setAttribute('aria-invalid', 'true');
    const facts = [['value', problem.value], ['limit', problem.limit]].filter(([, value]) => value !== undefined && value !== null);
    line.replaceChildren(Object.assign(document.createElement('b'), { textContent: problem.field ?? 'Not saved' }), ` ${problem.detail ?? problem.title}`,
      ...facts.map(([word, value]) => Object.assign(document.createElement('small'), { textContent: `${word}: ${Array.isArray(value) ? value.join(' to ') : value}` })));
  }

  async function save(action) {
    if (busy) return;
    busy = true;
    fault(null);
    $('fence-save').disabled = true;
    const { text } = body(action);
    try {
      const answer = await fetch(here('fences'), { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: text });
      const said = await answer.json().catch(() => ({ title: `The server answered ${answer.status}.` }));
      if (!answer.ok) { fault(said); return; }
      awaited = { ...said, action, until: Date.now() + WAIT_MS };
      note(action === 'delete' ? 'Deleted; gone in a moment.' : 'Saved; in force in a moment.', true);
      close();
      setTimeout(() => { if (awaited && Date.now() >= awaited.until) { awaited = null; note('Saved, and not in force yet. Is ingest up? What it refused: geo-assets dead-letters list'); } }, WAIT_MS + 100);
    } catch {
      fault({ detail: 'The server cannot be reached.' });
    } finally {
      busy = false;
      if (!form.hidden) changed();
    }
  }

  form.addEventListener('submit', (event) => { event.preventDefault(); if (form.reportValidity()) save('update'); });
  form.elements.radius_m.addEventListener('input', () => {
    const shape = drawn(), radius = Number(form.elements.radius_m.value);
    if (shape && radius > 0) draw.updateFeatureGeometry(feature, { type: 'Polygon', coordinates: [ringAround(circleOf(shape.geometry.coordinates[0]).middle, radius)] });
  });
  form.elements.width_m.addEventListener('input', corridor);
  $('fence-cancel').addEventListener('click', () => { close(); note(''); });
  $('fence-delete').addEventListener('click', () => save('delete'));
  for (const button of document.querySelectorAll('[data-draw]')) button.addEventListener('click', () => begin(button.dataset.draw));

  return {
    edit,
    get active() { return kind !== null || editing !== null; },
    /** Fences were read anew: what was saved is in force when it is among them. */
    fencesChanged() {
      const found = awaited && fences.get(awaited.key);
      if (!awaited || (awaited.action === 'delete' ? found : !found || found.properties.revision < awaited.received_ms)) return;
      note(awaited.action === 'delete' ? 'Deleted.' : 'In force.', true);
      if (awaited.action !== 'delete') fences.pulse(awaited.key);
      awaited = null;
      setTimeout(() => { if (!kind && !editing && !awaited) note(''); }, 4000);
    },
  };
}
