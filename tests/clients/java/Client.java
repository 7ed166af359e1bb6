// What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
// Java has no JSON of its own, so PostgreSQL reads the requests and writes the answers.

import java.io.*;
import java.nio.charset.StandardCharsets;
import java.sql.*;
import java.util.*;
import org.postgresql.PGConnection;

public class Client {
    static Connection db;

    static String answer(String request) throws SQLException {
        if (request.startsWith("{\"wait\": ")) {
            double seconds = Double.parseDouble(request.replaceAll("[^0-9.]", ""));
            var found = db.unwrap(PGConnection.class).getNotifications((int) (1000 * seconds));
            return "{\"notified\": " + (found != null && found.length > 0) + "}";
        }
        if (request.startsWith("{\"run\": ")) {
            try (Statement statement = db.createStatement()) {
                statement.execute(request.replaceAll("^.*?: \"|\"}$", ""));
            }
            return "{\"rows\": []}";
        }
        Map<String, String> asked = pairs(request);
        // The names are the kit's own; the values are sent apart, as texts whose type is left open
        // (setString would send them as varchar, which is not looked for where a uuid is wanted).
        Map<String, String> args = pairs(asked.get("args"));
        var named = new StringJoiner(", ");
        args.keySet().forEach(name -> named.add(name + " => ?"));
        String call = "select row_to_json(r) from (select * from taskboard."
            + asked.get("call") + "(" + named + ")) as r";
        try (PreparedStatement statement = db.prepareStatement(call)) {
            int place = 0;
            for (String value : args.values()) {
                statement.setObject(++place, value, Types.OTHER);
            }
            var rows = new StringJoiner(", ", "{\"rows\": [", "]}");
            for (ResultSet found = statement.executeQuery(); found.next();) {
                rows.add(found.getString(1));
            }
            return rows.toString();
        }
    }

    /** The names and values of an object. */
    static Map<String, String> pairs(String object) throws SQLException {
        var found = new LinkedHashMap<String, String>();
        try (PreparedStatement statement = db.prepareStatement(
                "select key, value from json_each_text(?::json)")) {
            statement.setString(1, object);
            for (ResultSet rows = statement.executeQuery(); rows.next();) {
                found.put(rows.getString(1), rows.getString(2));
            }
        }
        return found;
    }

    static Connection connect() throws SQLException {
        Map<String, String> env = System.getenv();
        var settings = new Properties();
        settings.put("user", env.get("PGUSER"));
        settings.put("password", env.getOrDefault("PGPASSWORD", ""));
        // A transaction pooler gives each call another session, so nothing is prepared.
        settings.put("prepareThreshold", "0");
        return DriverManager.getConnection("jdbc:postgresql://" + env.get("PGHOST") + ":"
            + env.getOrDefault("PGPORT", "5432") + "/" + env.get("PGDATABASE"), settings);
    }

    public static void main(String[] args) throws Exception {
        db = connect();
        var out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        var in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = in.readLine()) != null;) {
            try {
                out.println(answer(line));
            } catch (SQLException e) {
                out.println("{\"error\": {\"sqlstate\": \"" + e.getSQLState() + "\"}}");
            }
        }
    }
}
