// pg-boss: its own statements, heard as they are sent; its worker as it comes.
const { PAYLOAD, DSN, SLOTS, hit, bind, collected, literal, main } = require('./peer.js')
const found = require('pg-boss')
const PgBoss = found.PgBoss || found.default || found

async function sql () {
  const heard = []
  const boss = new PgBoss({ db: { executeSql: async (text, values) => {
    heard.push([text, values || []])
    return { rows: [{ id: '1', count: '1' }], rowCount: 1 }
  } } })
  const last = () => { const [text, values] = heard.at(-1); return bind(text, values.map(literal)) }
  const data = JSON.parse(PAYLOAD)
  const id = '00000000-0000-0000-0000-000000000077'
  await boss.send('email', data)
  const send = last().replace(JSON.stringify(data), () => PAYLOAD)
  const [text, values] = (await boss.insert([{ name: 'email', data }]), heard.at(-1))
  const jobs = `(select jsonb_agg('${JSON.stringify({ name: 'email', data })}'::jsonb)::json from generate_series(1, @N@))`
  const bulk = bind(text, [jobs, ...values.slice(1).map(literal)])
  await boss.fetch('email', { batchSize: 77 })
  const fetch = n => last().replaceAll('77', n)
  const one = collected(fetch('1'), 'max(id::text) as id, count(data)'), many = collected(fetch('@N@'), 'array_agg(id) as ids, count(data)')
  await boss.complete('email', id)
  const done = last()
  return {
    enqueue: send, bulk: bulk.includes('RETURNING') ? collected(bulk, 'count(*)') : bulk,
    one: one + ' \\gset\n' + done.replace(`'{${id}}'`, "'{:id}'"),
    many: many + ' \\gset\n' + done.replace(`'{${id}}'`, "':ids'"),
    waiting: "select count(*) from pgboss.job where state in ('created', 'retry', 'active')",
    tables: ['pgboss.job'],
    guarantees: {
      'token checked': 'no: by id and state',
      "dead worker's job": 'failed by a timeout (15 minutes), then retried',
      history: 'yes, archived', 'seen in': 'pg-boss/src/plans.js'
    }
  }
}

async function boss () {
  const own = new PgBoss({ connectionString: DSN, max: SLOTS + 2 })
  own.on('error', console.error)
  await own.start()
  return own
}

async function install () {
  const own = await boss()
  await own.createQueue('email')
  await own.stop({ graceful: false })
}

async function work () {
  const own = await boss()
  await own.work('email', { batchSize: SLOTS, pollingIntervalSeconds: 0.5 }, async jobs => {
    for (const job of Array.isArray(jobs) ? jobs : [jobs]) hit(job.data.n)
  })
}

main({ sql, install, work })
