// Drawing fences: an area, a circle or a corridor with the mouse, its numbers in a form, and saving it.

import { $, here } from './dom.js';

const KINDS = { area: 'polygon', circle: 'circle', corridor: 'linestring' };
const HINTS = {
  area: 'Click the corners; click the first one again to close it.',
  circle: 'Click the middle, then the edge.',
  corridor: 'Click along the way; click the last corner again to end it.',
};
const AXIS_M = 6_378_137, ECCENTRICITY = 0.00669437999014; // of WGS 84; the square of the first
const MOST_CORNERS = 80; // of a fence whose corners can still be pulled about one by one
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
const round9 = (value) => Math.round(value * 1e9) / 1e9;

/** Metres of a radian northwards and eastwards at a latitude, on the ellipsoid (WGS 84): as good as exact below 10 km. */
function scaleAt(lat) {
  const sine = Math.sin(radians(lat)) ** 2, part = 1 - ECCENTRICITY * sine;
  return [(AXIS_M * (1 - ECCENTRICITY)) / part ** 1.5, (AXIS_M / Math.sqrt(part)) * Math.cos(radians(lat))];
}

function metres([x1, y1], [x2, y2]) {
  const [north, east] = scaleAt((y1 + y2) / 2);
  return Math.hypot(radians(y2 - y1) * north, radians(x2 - x1) * east);
}

/** A circle as it is shown while it is drawn; what is saved is its middle and radius. */
function ringAround([lng, lat], radius) {
  const ring = [];
  for (let i = 0; i <= 32; i++) {
    const bearing = (-2 * Math.PI * (i % 32)) / 32, [north] = scaleAt(lat);
    const y = lat + ((radius * Math.cos(bearing)) / north) * (180 / Math.PI), [, east] = scaleAt((lat + y) / 2);
    ring.push([round9(lng + ((radius * Math.sin(bearing)) / east) * (180 / Math.PI)), round9(y)]);
  }
  return ring;
}

/** Middle and radius of a ring, and how far from one its corners are, as a fraction. */
function circleOf(ring) {
  const xs = ring.map(([x]) => x), ys = ring.map(([, y]) => y);
  const middle = [(Math.min(...xs) + Math.max(...xs)) / 2, (Math.min(...ys) + Math.max(...ys)) / 2];
  const all = ring.map((point) => metres(middle, point)), reach = all.reduce((sum, one) => sum + one, 0) / all.length;
  return { middle, reach, off: Math.max(...all.map((one) => Math.abs(one - reach))) / reach };
}

/** A standing fence's circle: its 128 corners lie a hair outside, so that their sides' middles lie a hair inside. */
function standingCircle({ type, coordinates }) {
  if (type !== 'Polygon' || coordinates.length !== 1 || coordinates[0].length !== 129) return null;
  const { middle, reach, off } = circleOf(coordinates[0]);
  return off < 0.001 ? { middle, radius: (reach * (1 + Math.cos(Math.PI / 128))) / 2 } : null;
}

/** The drawing tools; nothing happens before a kind is chosen or a fence is to be changed. */
export function drawing(map, { fences }) {
  const form = $('fence-form');
  let draw = null, kind = null, feature = null, editing = null, touched = false, busy = false, awaited = null, wrong = null;

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
        new TerraDrawPolygonMode({ styles: ground }), new TerraDrawCircleMode({ styles: ground, segments: 32 }),
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
      touched = true;
      // Not while the library is still ending its own way of drawing.
      $('panel').classList.remove('picking');
      setTimeout(() => { draw.setMode('select'); draw.selectFeature(id); changed(); note(''); form.elements.name.focus(); });
    });
    draw.on('change', (ids, type) => { if (feature !== null && ids.includes(feature) && type === 'update') { touched = true; if (wrong) fault(null); changed(); } });
    map.addSource('draft', { type: 'geojson', data: { type: 'FeatureCollection', features: [] } });
    map.addLayer({ id: 'draft-corridor', type: 'line', source: 'draft', layout: { 'line-cap': 'round', 'line-join': 'round' },
      paint: { 'line-color': FORCE, 'line-opacity': 0.22, 'line-width': 1 } }, 'geofences-label');
    map.addLayer({ id: 'draft-fault', type: 'circle', source: 'draft', filter: ['==', ['geometry-type'], 'Point'],
      paint: { 'circle-radius': 13, 'circle-color': 'rgba(194, 36, 76, 0.18)', 'circle-stroke-color': '#c2244c', 'circle-stroke-width': 2.5 } });
  }

  function changed() {
    const shape = drawn();
    if (kind === 'circle' && shape && touched && document.activeElement !== form.elements.radius_m) {
      form.elements.radius_m.value = circleOf(shape.geometry.coordinates[0]).reach.toFixed(1);
    }
    corridor();
    $('fence-save').disabled = busy || (!shape && !editing);
  }

  function corridor() {
    const shape = kind === 'corridor' ? drawn() : null;
    const shown = [shape?.geometry, wrong && { type: 'Point', coordinates: wrong }].filter(Boolean);
    map.getSource('draft')?.setData({ type: 'FeatureCollection', features: shown.map((geometry) => ({ type: 'Feature', properties: {}, geometry })) });
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
    $('fence-delete').hidden = !editing;
    for (const [name, of] of [['radius', 'circle'], ['width', 'corridor']]) $(`${name}-row`).hidden = kind !== of;
    form.hidden = false;
    $('panel').classList.add('editing');
    changed();
  }

  function close() {
    form.hidden = true;
    $('panel').classList.remove('editing', 'picking');
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
    $('panel').classList.add('picking'); // on a phone the form waits until there is a shape
    open({ area: 'New area', circle: 'New circle', corridor: 'New corridor' }[next], { width_m: next === 'corridor' ? 40 : '' });
  }

  async function edit(found) {
    try { await started(); } catch (error) { note(`Drawing is not possible: ${error.message}`); return; }
    close();
    editing = found;
    const { name, dwell_s, hysteresis_m, priority } = found.properties;
    const { type, coordinates } = found.geometry, round = standingCircle(found.geometry);
    let ring = null;
    if (round) {
      kind = 'circle';
      ring = ringAround(round.middle, round.radius);
    } else if (type === 'Polygon' && coordinates.length === 1 && coordinates[0].length <= MOST_CORNERS) {
      ring = coordinates[0].map(([x, y]) => [round9(x), round9(y)]);
    }
    if (ring) {
      draw.setMode('select');
      const [added] = draw.addFeatures([{ type: 'Feature', properties: { mode: round ? 'circle' : 'polygon' }, geometry: { type, coordinates: [ring] } }]);
      if (added.valid) { feature = added.id; draw.selectFeature(feature); } else ring = null;
    }
    note(ring ? 'Pull its corners, or change its numbers.' : 'Its numbers can be changed here; its shape is too intricate.');
    touched = false;
    open(name || 'Fence', { name, dwell_s, hysteresis_m, priority: priority || '', radius_m: round ? Number(round.radius.toFixed(2)) : '' });
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
    // What the geometry library says of a place, such as «Self-intersection[24.9 60.1]», is shown at that place.
    const place = problem?.detail?.match(/^([\w -]+)\[(-?[\d.e-]+) (-?[\d.e-]+)\]$/);
    wrong = place ? [Number(place[2]), Number(place[3])] : null;
    if (draw) corridor();
    if (!problem) return;
    const input = form.elements[problem.field?.replace('properties.', '')];
    input?.setAttribute('aria-invalid', 'true');
    const detail = place ? `${place[1] === 'Self-intersection' ? 'the border crosses itself' : place[1]}, where it is marked` : problem.detail ?? problem.title, named = `${problem.field}: `;
    const facts = [['value', problem.value], ['limit', problem.limit]].filter(([, value]) => value !== undefined && value !== null);
    line.replaceChildren(Object.assign(document.createElement('b'), { textContent: problem.field ?? 'Not saved' }), ` ${detail.startsWith(named) ? detail.slice(named.length) : detail}`,
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
