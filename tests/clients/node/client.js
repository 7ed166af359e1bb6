// What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
'use strict'
const { createInterface } = require('node:readline')
const { once } = require('node:events')
const { Client, types } = require('pg')

// Documents and dates stay texts: JSON.parse would round integers beyond 2^53.
const asText = { getTypeParser: (oid) => (oid === types.builtins.BOOL ? (t) => t === 't' : String) }

async function answer(client, request) {
  if ('wait' in request) {
    const late = AbortSignal.timeout(request.wait * 1000)
    const woken = await once(client, 'notification', { signal: late }).then(() => true, () => false)
    return { notified: woken }
  }
  if ('run' in request) {
    await client.query(request.run)
    return { rows: [] }
  }
  // The names are the kit's own; the values are sent apart, as texts whose type is left open.
  const named = Object.keys(request.args).map((name, i) => `${name} => $${i + 1}`)
  const text = `select * from taskboard.${request.call}(${named.join(', ')})`
  const { rows } = await client.query({ text, values: Object.values(request.args), types: asText })
  return { rows }
}

async function main() {
  const client = new Client({ connectionString: process.env.TASKBOARD_DATABASE_URL })
  await client.connect()
  for await (const line of createInterface({ input: process.stdin })) {
    const found = await answer(client, JSON.parse(line)).catch((error) => ({
      error: { sqlstate: error.code, message: error.message },
    }))
    process.stdout.write(JSON.stringify(found) + '\n')
  }
  await client.end()
}

main()
