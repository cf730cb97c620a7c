// A consumer in another language: reads lines {"topic", "value" (JSON text)} and checks each value against the topic's
// schema in the folder it is given. It knows the keywords that those schemas use, and stops at any other.
import { readFileSync } from 'node:fs';

const WORDS = new Set(['$schema', '$id', '$defs', 'title', 'description', 'examples', 'default', 'contentEncoding']);

const type = (value) => {
  if (value === null) return 'null';
  if (Array.isArray(value)) return 'array';
  if (Number.isInteger(value)) return 'integer';
  return typeof value;
};
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

const CHECKS = {
  $ref: (name, value, root) => faults(root.$defs[name.replace('#/$defs/', '')], value, root),
  type: (wanted, value) => {
    const is = type(value);
    const ok = [wanted].flat().some((one) => one === is || (one === 'number' && is === 'integer'));
    return ok ? [] : [`is ${is}, not ${wanted}`];
  },
  enum: (values, value) => (values.some((one) => same(one, value)) ? [] : [`is none of ${values}`]),
  const: (wanted, value) => (same(wanted, value) ? [] : [`is not ${wanted}`]),
  anyOf: (schemas, value, root) => {
    const all = schemas.map((one) => faults(one, value, root));
    return all.some((one) => one.length === 0) ? [] : all.flat();
  },
  oneOf: (schemas, value, root) => {
    const all = schemas.map((one) => faults(one, value, root));
    const count = all.filter((one) => one.length === 0).length;
    return count === 1 ? [] : count === 0 ? all.flat() : [`is ${count} of oneOf`];
  },
  required: (names, value) =>
    type(value) === 'object' ? names.filter((name) => !(name in value)).map((name) => `${name} is missing`) : [],
  properties: (members, value, root) =>
    type(value) === 'object'
      ? Object.entries(members).flatMap(([name, schema]) =>
          name in value ? faults(schema, value[name], root).map((fault) => `${name}: ${fault}`) : [])
      : [],
  additionalProperties: (schema, value, root, whole) =>
    type(value) === 'object'
      ? Object.keys(value)
          .filter((name) => !(name in (whole.properties ?? {})))
          .flatMap((name) => faults(schema, value[name], root).map((fault) => `${name}: ${fault}`))
      : [],
  items: (schema, value, root) => (Array.isArray(value) ? value.flatMap((one) => faults(schema, one, root)) : []),
  prefixItems: (schemas, value, root) =>
    Array.isArray(value) ? schemas.flatMap((one, i) => (i < value.length ? faults(one, value[i], root) : [])) : [],
  minItems: (limit, value) => (Array.isArray(value) && value.length < limit ? ['has too few entries'] : []),
  maxItems: (limit, value) => (Array.isArray(value) && value.length > limit ? ['has too many entries'] : []),
  minLength: (limit, value) => (typeof value === 'string' && [...value].length < limit ? ['is too short'] : []),
  maxLength: (limit, value) => (typeof value === 'string' && [...value].length > limit ? ['is too long'] : []),
  pattern: (text, value) => (typeof value === 'string' && !new RegExp(text, 'u').test(value) ? [`is not ${text}`] : []),
  minimum: (limit, value) => (typeof value === 'number' && value < limit ? [`is below ${limit}`] : []),
  maximum: (limit, value) => (typeof value === 'number' && value > limit ? [`is above ${limit}`] : []),
  exclusiveMinimum: (limit, value) => (typeof value === 'number' && value <= limit ? [`is not above ${limit}`] : []),
};

function faults(schema, value, root) {
  if (schema === true) return [];
  if (schema === false) return ['may not be there'];
  return Object.entries(schema).flatMap(([word, argument]) => {
    if (WORDS.has(word)) return [];
    if (!(word in CHECKS)) throw new Error(`unknown keyword ${word}`);
    return CHECKS[word](argument, value, root, schema);
  });
}

const folder = process.argv[2];
const schemas = {};
let bad = 0;
let good = 0;
for (const line of readFileSync(0, 'utf8').split('\n').filter(Boolean)) {
  const { topic, value } = JSON.parse(line);
  schemas[topic] ??= JSON.parse(readFileSync(`${folder}/${topic}.json`, 'utf8'));
  const found = faults(schemas[topic], JSON.parse(value), schemas[topic]);
  if (found.length) {
    bad += 1;
    console.log(`${topic}: ${found.slice(0, 3).join('; ')}: ${value.slice(0, 200)}`);
  } else good += 1;
}
console.log(JSON.stringify({ good, bad }));
