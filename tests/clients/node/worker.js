// A complete Taskboard worker with pg. Copy it, and put your own work into `work`.
//
//   npm install pg
//   TASKBOARD_DATABASE_URL=postgresql://… TASKBOARD_QUEUE=default node worker.js
'use strict'
const { setTimeout: sleep } = require('node:timers/promises')
const { Client } = require('pg')

const QUEUE = process.env.TASKBOARD_QUEUE ?? 'default'
const KINDS = ['kit'] // what `work` knows to do; other kinds are left to others
const stopping = new AbortController()

// Your work. `signal` tells it to stop; what it returns is kept as the result.
async function work(payload, signal) {
  await sleep((payload.seconds ?? 0) * 1000, undefined, { signal })
  if (payload.fail) throw new Error(payload.fail)
  return payload
}

// A connection that is made again when it breaks. A call without an answer is sent again: that is
// safe, since a claim whose answer was lost lapses, and everything else carries its token.
class Session {
  async call(text, values, patience = 60) {
    const giveUp = performance.now() + patience * 1000
    for (;;) {
      try {
        this.client ??= await this.connect()
        return (await this.client.query(text, values)).rows
      } catch (error) {
        if (!repeatable(error) || performance.now() > giveUp) throw error
        this.close()
        await sleep(200)
      }
    }
  }

  async connect() {
    const client = new Client({
      connectionString: process.env.TASKBOARD_DATABASE_URL,
      connectionTimeoutMillis: 10_000,
      query_timeout: 10_000, // a dead peer does not say so; functions wait 5 s for a row at most
    })
    client.on('error', () => {}) // a broken connection; the next call finds it, and makes another
    await client.connect()
    return client
  }

  close() {
    this.client?.end().catch(() => {})
    this.client = undefined
  }
}

// Nothing changed, or nobody knows: the last is so without an SQLSTATE, the connection broke.
function repeatable({ code = '' }) {
  return /^(08|57|40001|40P01|55P03)/.test(code) || !/^[0-9A-Z]{5}$/.test(code)
}

// Renew every third of the lease, on a session of its own, until `done`; `halt` tells the work why
// it must stop. Work that blocks the event loop belongs into a worker thread, or nothing renews.
async function keep(job, halt, done) {
  const session = new Session()
  const third = job.lease_seconds / 3
  const ours = [job.job_id, job.lease_token]
  while (await sleep(third * 1000, true, { signal: done }).catch(() => false)) {
    const [renewed] = await session
      .call('select cancel_requested from taskboard.renew($1, $2)', ours, third)
      .catch(() => []) // we may not hear of it before the lease runs out
    if (!renewed) return halt('lost'), session.close() // zero rows: it may be somebody else's
    if (renewed.cancel_requested) halt('cancelled')
  }
  session.close()
}

// Do one job; answer what became of it. Zero rows from any call: it was no longer ours.
async function attempt(session, job) {
  const halted = new AbortController()
  const halt = (why) => halted.abort(why) // the first reason stays
  const onStop = () => halt('stopping')
  stopping.signal.addEventListener('abort', onStop)
  if (stopping.signal.aborted) onStop()
  const done = new AbortController()
  const keeper = keep(job, halt, done.signal)
  const [result, error] = await work(JSON.parse(job.payload), halted.signal).then(
    (result) => [result], (error) => [null, error])
  done.abort()
  await keeper
  stopping.signal.removeEventListener('abort', onStop)
  const why = halted.signal.reason
  const ours = [job.job_id, job.lease_token]
  if (why === 'lost') return 'lost' // record nothing: that is for the new owner to do
  if (why) { // given back; after a cancel that ends the job
    const [row] = await session.call('select state from taskboard.release($1, $2)', ours)
    return !row ? 'lost' : row.state === 'cancelled' ? 'cancelled' : 'released'
  }
  if (error) {
    const [row] = await session.call(
      'select state from taskboard.fail($1, $2, $3)', [...ours, String(error)])
    return row ? 'failed' : 'lost'
  }
  const [row] = await session.call(
    'select job_id from taskboard.complete($1, $2, $3)', [...ours, JSON.stringify(result)])
  return row ? 'completed' : 'lost'
}

async function main() {
  process.on('SIGTERM', () => stopping.abort())
  const session = new Session()
  while (!stopping.signal.aborted) {
    const jobs = await session.call(
      `select job_id, lease_token, payload::text, extract(epoch from lease)::float8 as lease_seconds
       from taskboard.claim(queues => $1, kinds => $2)`, [[QUEUE], KINDS])
    for (const job of jobs) console.log(await attempt(session, job), job.job_id)
    if (!jobs.length) await sleep(1000, undefined, { signal: stopping.signal }).catch(() => {})
  }
  session.close()
}

main()
