# What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.

require "json"
require "pg"

Encoding.default_external = Encoding::UTF_8
$conn = PG.connect(ENV.fetch("TASKBOARD_DATABASE_URL"))

def answer(request)
  case request
  in { wait: seconds }
    { notified: !$conn.wait_for_notify(seconds).nil? }
  in { run: text }
    $conn.exec(text)
    { rows: [] }
  in { call:, args: }
    # The names are the kit's own; the values are sent apart, as texts whose type is left open.
    # What comes back are texts, too: documents to the last digit.
    named = args.keys.each.with_index(1).map { |name, i| "#{name} => $#{i}" }
    sql = "select * from taskboard.#{call}(#{named.join(", ")})"
    { rows: $conn.exec_params(sql, args.values).to_a }
  end
end

$stdin.each_line do |line|
  found = begin
    answer(JSON.parse(line, symbolize_names: true))
  rescue PG::Error => e
    { error: { sqlstate: e.result&.error_field(PG::PG_DIAG_SQLSTATE), message: e.message } }
  end
  puts JSON.generate(found)
  $stdout.flush
end
