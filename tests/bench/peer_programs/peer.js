// What the programs of the Node peers share; see peer.py and meter.py.
const fs = require('node:fs')

const PAYLOAD = '{"to": "ada@example.com", "subject": "Hello", "text": "about a hundred bytes of text"}'
const { BENCH_DSN: DSN, BENCH_OUT: OUT, BENCH_MODE: MODE } = process.env
const SLOTS = Number(process.env.BENCH_SLOTS || 10)
const SECONDS = Number(process.env.BENCH_SECONDS || 5)
const JOBS = Number(process.env.BENCH_JOBS || 0)

let count = 0, began = 0, warm = 0, warmAt = 0, told = false
function say (text) { if (OUT) fs.appendFileSync(OUT, text + '\n') }
function hit (n) {
  if (MODE === 'pickup') return say(`${n} ${(performance.timeOrigin + performance.now()) / 1000}`)
  const now = performance.now() / 1000
  count += 1
  if (count === 1) began = now
  else if (!warm && (now > began + SECONDS / 10 || count * 10 >= JOBS)) { warm = count; warmAt = now }
  else if (warm && !told && (now > Math.max(began + SECONDS, warmAt + SECONDS / 2) || count >= JOBS)) {
    told = true
    say(`rate ${(count - warm) / (now - warmAt)}`)
  }
}

// Put SQL for $1, $2, … into a statement, on one line.
function bind (text, values) {
  text = text.replace(/--[^\n]*/g, '')
  for (let n = values.length; n > 0; n--) text = text.replaceAll('$' + n, () => values[n - 1])
  return text.split(/\s+/).join(' ').trim().replace(/;$/, '')
}

// Let a statement's rows be the input of a select: its end becomes one more `with` part.
function collected (text, select) {
  let depth = 0, quoted = false, cut = -1
  for (const found of text.matchAll(/[()']|\b(?:select|update|delete|insert)\b/gi)) {
    const word = found[0].toLowerCase()
    if (word === "'") quoted = !quoted
    else if (!quoted && word === '(') depth += 1
    else if (!quoted && word === ')') depth -= 1
    else if (!quoted && depth === 0 && cut < 0) cut = found.index
  }
  const head = /^with /i.test(text) ? text.slice(0, cut).trim() + ', ' : 'with '
  return `${head}final_rows as (${text.slice(cut)}) select ${select} from final_rows`
}

function literal (value) {
  if (value === null || value === undefined) return 'null'
  if (Array.isArray(value)) return `'{${value.join(',')}}'`
  if (typeof value === 'object') return `'${JSON.stringify(value)}'`
  return typeof value === 'number' ? String(value) : `'${value}'`
}

function main (parts) {
  const what = process.argv[2]
  Promise.resolve(parts[what]()).then(found => {
    if (what === 'sql') console.log(JSON.stringify(found))
    if (what !== 'work') process.exit(0)
  }).catch(error => { console.error(error); process.exit(1) })
}

module.exports = { PAYLOAD, DSN, SLOTS, hit, bind, collected, literal, main }
