// A complete Taskboard worker with JDBC. Copy it, and put your own work into `work`.
//
//   PGHOST=… PGDATABASE=… PGUSER=… java -cp postgresql.jar Worker.java

import java.sql.*;
import java.util.*;
import java.util.concurrent.*;

public class Worker {
    static final String QUEUE = System.getenv().getOrDefault("TASKBOARD_QUEUE", "default");
    static final String KINDS = "{kit}"; // what `work` knows to do; others are left to others
    static final CountDownLatch stopping = new CountDownLatch(1);
    static volatile Future<String> atWork;

    /** Your work. An interrupt tells it to stop. What it returns, a document, is kept. */
    static String work(String seconds, String fail, String payload) throws Exception {
        Thread.sleep((long) (1000 * Double.parseDouble(seconds)));
        if (fail != null) {
            throw new Exception(fail);
        }
        return payload;
    }

    /** A connection that is made again when it breaks. */
    static class Session {
        Connection db;

        /**
         * The first row as texts, or null: zero rows. A call without an answer is sent again: that
         * is safe: a claim whose answer was lost lapses, everything else carries its token.
         */
        String[] call(long patience, String sql, String... values) throws Exception {
            for (long giveUp = System.nanoTime() + patience * 1_000_000;; Thread.sleep(200)) {
                try {
                    db = db == null ? connect() : db;
                    try (PreparedStatement statement = db.prepareStatement(sql)) {
                        for (int i = 0; i < values.length; i++) {
                            // As a text whose type is left open: it may be a uuid.
                            statement.setObject(i + 1, values[i], Types.OTHER);
                        }
                        ResultSet rows = statement.executeQuery();
                        String[] row = new String[rows.getMetaData().getColumnCount()];
                        if (!rows.next()) {
                            return null;
                        }
                        for (int i = 0; i < row.length; i++) {
                            row[i] = rows.getString(i + 1);
                        }
                        return row;
                    }
                } catch (SQLException e) { // those codes: nothing changed, or nobody knows
                    close();
                    if (!String.valueOf(e.getSQLState()).matches("(08|57).*|40001|40P01|55P03")
                            || System.nanoTime() > giveUp) {
                        throw e;
                    }
                }
            }
        }

        Connection connect() throws SQLException {
            Map<String, String> env = System.getenv();
            var settings = new Properties();
            settings.put("user", env.get("PGUSER"));
            settings.put("password", env.getOrDefault("PGPASSWORD", ""));
            settings.put("ApplicationName", env.getOrDefault("PGAPPNAME", "worker"));
            settings.put("prepareThreshold", "0"); // a transaction pooler changes sessions
            settings.put("socketTimeout", "10"); // a dead peer does not say so
            return DriverManager.getConnection("jdbc:postgresql://" + env.get("PGHOST") + ":"
                + env.getOrDefault("PGPORT", "5432") + "/" + env.get("PGDATABASE"), settings);
        }

        void close() {
            try {
                if (db != null) {
                    db.close();
                }
            } catch (SQLException e) {
                // it was broken
            }
            db = null;
        }
    }

    /** Do one job; answer what became of it. Zero rows from any call: it was no longer ours. */
    static String attempt(Session session, String[] job) throws Exception {
        String id = job[0], token = job[1], why = null, result = null, error = null;
        long third = (long) (Double.parseDouble(job[2]) * 1000 / 3);
        boolean ended = false;
        ExecutorService worker = Executors.newSingleThreadExecutor();
        Future<String> work = atWork = worker.submit(() -> work(job[3], job[4], job[5]));
        while (!ended && why == null) {
            try {
                if (stopping.getCount() == 0) {
                    work.cancel(true);
                }
                result = work.get(third, TimeUnit.MILLISECONDS);
                ended = true;
            } catch (TimeoutException e) { // every third of the lease, whatever the work is doing
                why = renew(session, third, id, token);
            } catch (CancellationException e) {
                why = "stopping";
            } catch (ExecutionException e) {
                error = String.valueOf(e.getCause());
                ended = true;
            }
        }
        worker.shutdownNow();
        worker.awaitTermination(1, TimeUnit.MINUTES);
        String[] row;
        if ("lost".equals(why)) {
            return "lost"; // record nothing: that is for the new owner to do
        } else if (why != null) { // given back; after a cancel that ends the job
            row = session.call(60_000, "select case state when 'cancelled' then state"
                + " else 'released' end from taskboard.release(?, ?)", id, token);
        } else if (error != null) {
            row = session.call(60_000,
                "select 'failed' from taskboard.fail(?, ?, ?)", id, token, error);
        } else {
            row = session.call(60_000,
                "select 'completed' from taskboard.complete(?, ?, ?)", id, token, result);
        }
        return row == null ? "lost" : row[0];
    }

    /** Renew; answer why the work must stop, or null. */
    static String renew(Session session, long third, String id, String token) throws Exception {
        try {
            String[] row = session.call(third,
                "select cancel_requested from taskboard.renew(?, ?)", id, token);
            // Zero rows: somebody else may be at it by now.
            return row == null ? "lost" : row[0].equals("t") ? "cancelled" : null;
        } catch (SQLException e) {
            return "lost"; // no answer: we may not hear of it before the lease runs out
        }
    }

    public static void main(String[] args) throws Exception {
        Thread main = Thread.currentThread();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> { // SIGTERM
            stopping.countDown();
            if (atWork != null) {
                atWork.cancel(true);
            }
            try {
                main.join();
            } catch (InterruptedException e) {
                // never
            }
            Runtime.getRuntime().halt(0);
        }));
        var session = new Session();
        while (stopping.getCount() > 0) {
            String[] job = session.call(60_000,
                "select job_id, lease_token, extract(epoch from lease),"
                + " coalesce(payload ->> 'seconds', '0'), payload ->> 'fail', payload"
                + " from taskboard.claim(queues => array[?], kinds => ?)", QUEUE, KINDS);
            if (job == null) {
                stopping.await(1, TimeUnit.SECONDS);
            } else {
                System.out.println(attempt(session, job) + " " + job[0]);
            }
        }
    }
}
