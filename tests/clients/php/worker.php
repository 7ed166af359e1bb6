<?php
// A complete Taskboard worker with PDO. Copy it, and put your own work into `work`.
//
//   PGHOST=… PGDATABASE=… PGUSER=… TASKBOARD_QUEUE=default php worker.php

const KINDS = '{kit}'; // what `work` knows to do; other kinds are left to others
const AGAIN = '/^(08|57|40001|40P01|55P03|HY000)/'; // nothing changed, or nobody knows

// Your work: a document in, its result, a document, out. It runs in a process of its own, so that
// this one can renew the lease meanwhile; SIGTERM stops it.
function work(string $payload): string
{
    $todo = json_decode($payload, true, flags: JSON_THROW_ON_ERROR);
    usleep((int) (1e6 * ($todo['seconds'] ?? 0)));
    if (isset($todo['fail'])) {
        throw new RuntimeException($todo['fail']);
    }
    return $payload;
}

// The first row, or null: zero rows. A call without an answer is sent again: that is safe, since a
// claim whose answer was lost lapses, and everything else carries its token.
function call(float $patience, string $sql, array $values): ?array
{
    static $db = null;
    for ($giveUp = microtime(true) + $patience;; usleep(200_000)) {
        try {
            $db ??= new PDO('pgsql:', options: [
                PDO::ATTR_DEFAULT_FETCH_MODE => PDO::FETCH_ASSOC,
                PDO::ATTR_TIMEOUT => 10,
                PDO::PGSQL_ATTR_DISABLE_PREPARES => true,
            ]);
            $call = $db->prepare($sql);
            $call->execute($values);
            return $call->fetch() ?: null;
        } catch (PDOException $e) {
            $db = $call = null;
            if (!preg_match(AGAIN, $e->errorInfo[0] ?? '08') || microtime(true) > $giveUp) {
                throw $e;
            }
        }
    }
}

// Renew every third of the lease until the work has ended, and stop that when the lease is lost or
// the job cancelled. Answers why it was stopped, or '', and its exit code.
function keep(array $job, $work, bool &$stopping): array
{
    $third = $job['lease_seconds'] / 3;
    $next = microtime(true) + $third;
    for ($why = ''; ($status = proc_get_status($work))['running'] && !$why; usleep(50_000)) {
        if ($stopping) {
            $why = 'stopping';
        } elseif (microtime(true) >= $next) {
            $next = microtime(true) + $third;
            try {
                $renewed = call($third, 'select cancel_requested from taskboard.renew(?, ?)',
                    [$job['job_id'], $job['lease_token']]);
            } catch (PDOException) {
                $renewed = null; // we may not hear of it before the lease runs out
            }
            if (!$renewed) {
                $why = 'lost'; // zero rows: somebody else may be at it by now
            } elseif ($renewed['cancel_requested']) {
                $why = 'cancelled';
            }
        }
    }
    if (!$why && $stopping && $status['signaled']) {
        $why = 'stopping'; // the signal was for both of us
    }
    return [$why, $status['exitcode']];
}

// Do one job; answer what became of it. Zero rows from any call: it was no longer ours.
function attempt(array $job, bool &$stopping): string
{
    [$in, $out, $err] = [tmpfile(), tmpfile(), tmpfile()];
    fwrite($in, $job['payload']);
    rewind($in);
    $work = proc_open([PHP_BINARY, __FILE__, 'work'], [$in, $out, $err], $pipes);
    [$why, $code] = keep($job, $work, $stopping);
    if ($why) {
        proc_terminate($work);
    }
    proc_close($work);
    $written = fn ($file) => file_get_contents(stream_get_meta_data($file)['uri']);
    $ours = [$job['job_id'], $job['lease_token']];
    if ($why === 'lost') {
        return 'lost'; // record nothing: that is for the new owner to do
    } elseif ($why) { // given back; after a cancel that ends the job
        $row = call(60, "select case state when 'cancelled' then state else 'released' end as word
            from taskboard.release(?, ?)", $ours);
    } elseif ($code) {
        $row = call(60, "select 'failed' as word from taskboard.fail(?, ?, ?)",
            [...$ours, $written($err)]);
    } else {
        $row = call(60, "select 'completed' as word from taskboard.complete(?, ?, ?)",
            [...$ours, $written($out)]);
    }
    return $row['word'] ?? 'lost';
}

if (($argv[1] ?? '') === 'work') {
    try {
        echo work(stream_get_contents(STDIN));
    } catch (Throwable $e) {
        fwrite(STDERR, $e->getMessage());
        exit(1);
    }
    exit;
}
$stopping = false;
pcntl_async_signals(true);
pcntl_signal(SIGTERM, function () use (&$stopping) { $stopping = true; });
while (!$stopping) {
    $job = call(60, 'select job_id, lease_token, payload, extract(epoch from lease)::float8
        as lease_seconds from taskboard.claim(queues => array[?], kinds => ?)',
        [getenv('TASKBOARD_QUEUE') ?: 'default', KINDS]);
    if ($job) {
        echo attempt($job, $stopping), " {$job['job_id']}\n";
    } else {
        usleep(1_000_000); // a signal ends it early
    }
}
