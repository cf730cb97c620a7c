// Devices on the map: a canvas above it, because thousands of points that glide are no work for a tile worker.

import { $, count } from './dom.js';

const COLOURS = { outside: '#2463a8', inside: '#e8590c', silent: '#9b948b' };
const SILENT_MS = 30_000, GONE_MS = 300_000;
const LONGEST_GLIDE_MS = 2_500;
const RING_MS = 1_400;

/** Draws devices; `fencesAt` says which fences cover a place. */
export function showDevices(map, fencesAt) {
  const devices = new Map(); // id -> what is known of it
  const canvas = document.createElement('canvas'), context = canvas.getContext('2d');
  canvas.className = 'devices';
  map.getCanvasContainer().append(canvas);
  let on = true, frame = 0, moving = 0, box = null, width = 0, height = 0, scale = 1;

  const resize = () => {
    const { clientWidth, clientHeight } = map.getCanvas();
    scale = window.devicePixelRatio || 1;
    [width, height] = [clientWidth, clientHeight];
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    draw();
  };

  const place = (device, now) => {
    const part = device.glide ? Math.min(1, (now - device.since) / device.glide) : 1;
    return [device.fromLng + (device.lng - device.fromLng) * part, device.fromLat + (device.lat - device.fromLat) * part];
  };

  function draw() {
    frame = 0;
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!on) return;
    const now = performance.now(), wall = Date.now(), radius = Math.max(3, Math.min(7, map.getZoom() - 9));
    const paths = { silent: new Path2D(), outside: new Path2D(), inside: new Path2D() };
    const rings = [];
    for (const [id, device] of devices) {
      const [lng, lat] = place(device, now);
      const { x, y } = map.project([lng, lat]);
      device.x = x; device.y = y;
      if (x < -20 || y < -20 || x > width + 20 || y > height + 20) continue;
      const path = paths[wall - device.heard > SILENT_MS ? 'silent' : device.fences.length ? 'inside' : 'outside'];
      path.moveTo(x + radius, y);
      path.arc(x, y, radius, 0, 2 * Math.PI);
      if (device.ring && now - device.ring < RING_MS) rings.push([x, y, (now - device.ring) / RING_MS, device.ringColour]);
    }
    context.lineWidth = 1.5;
    context.strokeStyle = '#fff';
    for (const [kind, path] of Object.entries(paths)) {
      context.fillStyle = COLOURS[kind];
      context.fill(path);
      context.stroke(path);
    }
    for (const [x, y, part, colour] of rings) {
      context.beginPath();
      context.arc(x, y, radius + 22 * part, 0, 2 * Math.PI);
      context.lineWidth = 3 * (1 - part);
      context.strokeStyle = colour;
      context.stroke();
    }
    if (now < moving || rings.length) again();
  }
  const again = () => { frame ||= requestAnimationFrame(draw); };

  const counts = () => {
    let inside = 0, silent = 0;
    for (const device of devices.values()) {
      if (Date.now() - device.heard > SILENT_MS) silent++; else if (device.fences.length) inside++;
    }
    $('devices-count').textContent = count(devices.size);
    $('devices-inside').textContent = count(inside);
    $('devices-outside').textContent = count(devices.size - inside - silent);
    $('devices-silent').textContent = count(silent);
    $('devices-legend').hidden = !on || !devices.size;
    $('devices-empty').hidden = devices.size > 0;
  };
  setInterval(() => {
    const wall = Date.now();
    for (const [id, device] of devices) if (wall - device.heard > GONE_MS) devices.delete(id);
    counts();
    again();
  }, 5_000);

  const inBox = (lng, lat) => !box || (lat >= box[1] && lat <= box[3] && (box[0] <= box[2] ? lng >= box[0] && lng <= box[2] : lng >= box[0] || lng <= box[2]));

  map.on('render', () => { if (devices.size) { cancelAnimationFrame(frame); draw(); } });
  map.on('resize', resize);
  resize();
  return {
    update({ devices: rows, left_out: leftOut }) {
      const now = performance.now(), wall = Date.now();
      for (const [id, lng, lat, time, stamp] of rows) {
        const heard = Math.min(wall, stamp); // a page that was just opened is told of what was heard before
        if (!inBox(lng, lat)) { devices.delete(id); continue; }
        const known = devices.get(id);
        const fences = fencesAt(lng, lat);
        if (!known) {
          devices.set(id, { lng, lat, fromLng: lng, fromLat: lat, glide: 0, since: now, heard, time, fences, every: 1000 });
          continue;
        }
        // From where it is drawn now, in about the time until its next fix.
        const [fromLng, fromLat] = place(known, now);
        const far = Math.abs(lng - fromLng) > 0.5 || Math.abs(lat - fromLat) > 0.5;
        known.every = 0.7 * known.every + 0.3 * Math.min(LONGEST_GLIDE_MS, now - known.since);
        Object.assign(known, { lng, lat, fromLng: far ? lng : fromLng, fromLat: far ? lat : fromLat, glide: far ? 0 : Math.max(200, known.every * 1.1),
          since: now, heard, time, fences });
        moving = Math.max(moving, now + known.glide);
      }
      $('devices-more').textContent = leftOut ? `${count(leftOut)} more are not drawn; zoom in` : '';
      $('devices-more').hidden = !leftOut;
      counts();
      again();
    },
    fencesChanged() { for (const device of devices.values()) device.fences = fencesAt(device.lng, device.lat); counts(); again(); },
    box(next) { box = next; for (const [id, device] of devices) if (!inBox(device.lng, device.lat)) devices.delete(id); counts(); again(); },
    ring(id, colour) { const device = devices.get(id); if (device) { device.ring = performance.now(); device.ringColour = colour; again(); } },
    /** The device at a point of the screen, if any. */
    at({ x, y }) {
      if (!on) return null;
      let best = null, nearest = 12;
      for (const [id, device] of devices) {
        const distance = Math.hypot(device.x - x, device.y - y);
        if (distance < nearest) { nearest = distance; best = { id, ...device }; }
      }
      return best;
    },
    where: (id) => { const device = devices.get(id); return device && [device.lng, device.lat]; },
    show(shown) { on = shown; counts(); draw(); },
    get size() { return devices.size; },
  };
}
