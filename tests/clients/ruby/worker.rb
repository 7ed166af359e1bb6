# A complete Taskboard worker with pg. Copy it, and put your own work into `work`.
#
#   TASKBOARD_DATABASE_URL=postgresql://… TASKBOARD_QUEUE=default ruby worker.rb

require "json"
require "pg"

QUEUE = ENV.fetch("TASKBOARD_QUEUE", "default")
KINDS = ["kit"] # what `work` knows to do; other kinds are left to others
AGAIN = /^(08|57|40001|40P01|55P03)/ # nothing changed, or nobody knows
ARRAY = PG::TextEncoder::Array.new

# Wakes sleepers, and tells why. The first reason stays.
class Halt
  attr_reader :why

  def initialize
    @lock, @said = Mutex.new, ConditionVariable.new
  end

  def say(why)
    @lock.synchronize do
      @why ||= why
      @said.broadcast
    end
  end

  def sleep(seconds)
    @lock.synchronize { @said.wait(@lock, seconds) unless @why }
  end
end

# Your work. Look at `halt` now and then, and return when it says why. The result is kept.
def work(payload, halt)
  halt.sleep(payload.fetch("seconds", 0))
  raise payload["fail"] if payload["fail"]
  payload
end

# A connection that is made again when it breaks. A call without an answer is sent again: that is
# safe, since a claim whose answer was lost lapses, and everything else carries its token.
class Session
  def call(sql, *values, patience: 60)
    give_up = now + patience
    begin
      @conn ||= PG.connect(ENV.fetch("TASKBOARD_DATABASE_URL"), connect_timeout: 10,
                           tcp_user_timeout: 10_000) # a dead peer does not say so
      @conn.exec_params(sql, values).map { |row| row.transform_keys(&:to_sym) }
    rescue PG::Error => e
      code = e.result&.error_field(PG::PG_DIAG_SQLSTATE) # none: the connection broke
      raise if (code && code !~ AGAIN) || now > give_up
      close
      sleep 0.2
      retry
    end
  end

  def close
    @conn&.close
    @conn = nil
  end

  def now = Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

# Renew every third of the lease, in a thread and a session of its own: the work may block.
def keep(job, halt, done)
  session, third = Session.new, job[:lease_seconds].to_f / 3
  until done.sleep(third) || done.why
    renewed, = begin
      session.call("select cancel_requested from taskboard.renew($1, $2)",
                   job[:job_id], job[:lease_token], patience: third)
    rescue PG::Error
      [] # we may not hear of it before the lease runs out
    end
    break halt.say(:lost) unless renewed # zero rows: somebody else may be at it by now
    halt.say(:cancelled) if renewed[:cancel_requested] == "t"
  end
  session.close
end

# Do one job; answer what became of it. Zero rows from any call: it was no longer ours.
def attempt(session, job, halt)
  done = Halt.new
  keeper = Thread.new { keep(job, halt, done) }
  begin
    result = work(JSON.parse(job[:payload]), halt)
  rescue => e
    error = e.message
  end
  done.say(:done)
  keeper.join
  ours = [job[:job_id], job[:lease_token]]
  return "lost" if halt.why == :lost # record nothing: that is for the new owner to do
  row, = if halt.why # given back; after a cancel that ends the job
    session.call("select case state when 'cancelled' then state else 'released' end as word
                  from taskboard.release($1, $2)", *ours)
  elsif error
    session.call("select 'failed' as word from taskboard.fail($1, $2, $3)", *ours, error)
  else
    session.call("select 'completed' as word from taskboard.complete($1, $2, $3)",
                 *ours, JSON.generate(result))
  end
  row ? row[:word] : "lost"
end

$stdout.sync = true
stopping = halt = Halt.new
trap("TERM") { Thread.new { [stopping, halt].each { |one| one.say(:stopping) } } }
session = Session.new
until stopping.why
  job, = session.call("select job_id, lease_token, payload,
                       extract(epoch from lease) as lease_seconds
                       from taskboard.claim(queues => $1, kinds => $2)",
                      ARRAY.encode([QUEUE]), ARRAY.encode(KINDS))
  next stopping.sleep(1) unless job
  halt = Halt.new
  halt.say(:stopping) if stopping.why
  puts "#{attempt(session, job, halt)} #{job[:job_id]}"
end
