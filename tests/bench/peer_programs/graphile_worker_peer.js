// graphile-worker: its own statements, heard as they are sent; its runner as it comes.
const { PAYLOAD, DSN, SLOTS, hit, bind, collected, literal, main } = require('./peer.js')

const LOCAL = process.env.BENCH_LOCAL_QUEUE === '1'

async function sql () {
  const dist = require('node:path').dirname(require.resolve('graphile-worker'))
  const { batchGetJobs } = require(dist + '/sql/getJobs.js')
  const { batchCompleteJobs } = require(dist + '/sql/completeJobs.js')
  const heard = []
  const client = { query: async query => {
    heard.push([query.text, query.values])
    return { rows: query.text.startsWith('select id, identifier') ? [{ id: 1, identifier: 'email' }] : [] }
  } }
  const withClient = work => work(client)
  withClient.withRetries = withClient
  const shared = {
    escapedWorkerSchema: 'graphile_worker', workerSchema: 'graphile_worker', logger: console,
    resolvedPreset: { worker: { preparedStatements: false, useNodeTime: false } }
  }
  const last = () => { const [text, values] = heard.at(-1); return bind(text, values.map(literal)) }
  await batchGetJobs(shared, withClient, { email: 1 }, 'w', [], 77)
  const get = n => last().replace('limit 77', `limit ${n}`)
  const getOne = get(1), getMany = get('@N@')
  await batchCompleteJobs(shared, withClient, 'w', [{ id: 77, job_queue_id: null }])
  const doneOne = last().replace(/'?77'?/, ':id')
  await batchCompleteJobs(shared, withClient, 'w', [{ id: 77, job_queue_id: null }, { id: 77, job_queue_id: null }])
  const doneMany = last().replace("'{77,77}'", "':ids'")
  const spec = `('email', '${PAYLOAD}'::json, null, null, null, null, null, null)::graphile_worker.job_spec`
  return {
    enqueue: `select * from graphile_worker.add_job('email', '${PAYLOAD}'::json)`,
    bulk: `select count(*) from graphile_worker.add_jobs((select array_agg(${spec}) from generate_series(1, @N@)))`,
    one: getOne + ' \\gset\n' + doneOne,
    many: collected(getMany.replace('returning *', 'returning jobs.id, jobs.payload'), 'array_agg(id) as ids, count(payload)') + ' \\gset\n' + doneMany,
    waiting: 'select count(*) from graphile_worker._private_jobs',
    tables: ['graphile_worker._private_jobs'],
    guarantees: {
      'token checked': 'no: the row is deleted by its id',
      "dead worker's job": 'free again after four hours',
      history: 'no', 'seen in': 'graphile-worker/dist/sql/*.js'
    }
  }
}

async function install () {
  const { runMigrations, makeWorkerUtils } = require('graphile-worker')
  await runMigrations({ connectionString: DSN })
  const utils = await makeWorkerUtils({ connectionString: DSN })
  await utils.withPgClient(c => c.query("insert into graphile_worker._private_tasks (identifier) values ('email') on conflict do nothing"))
  await utils.release()
}

async function work () {
  const { run } = require('graphile-worker')
  const preset = { worker: { connectionString: DSN, concurrentJobs: SLOTS, maxPoolSize: SLOTS + 2 } }
  if (LOCAL) preset.worker.localQueue = { size: 500, ttl: 60000 }
  if (LOCAL) preset.worker.completeJobBatchDelay = 0
  const quiet = new (require('graphile-worker').Logger)(() => () => {})
  await run({ preset, logger: quiet, taskList: { email: async payload => hit(payload.n) } })
}

main({ sql, install, work })
