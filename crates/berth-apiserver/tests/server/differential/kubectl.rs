//! What kubectl prints for the same objects on both servers.

use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;

use berth_apiserver::server::Server;
use regex::Regex;
use tokio_util::sync::CancellationToken;

use crate::differential::peers::{Berth, testbed};

/// The commands, in their order; `OBJECTS` stands for the file with the objects.
const COMMANDS: &str = include_str!("kubectl.txt");

static NOISE: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    [
        (r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "(uid)"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "(time)"),
        (r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d [+-]\d{4}", "(time)"),
        (r#"resourceVersion"?: "\d+""#, "resourceVersion: (version)"),
        (r"\b\d+(s|m|m\d+s)\b", "(age)"),
        (r"kube-api-access-[a-z0-9]{5}", "kube-api-access-(random)"),
        // Columns are as wide as what differs.
        (r"[ \t]+", " "),
        (r"-{3,}", "---"),
    ]
    .map(|(pattern, to)| (Regex::new(pattern).expect("a pattern"), to))
    .into()
});

struct Printed {
    succeeded: bool,
    output: String,
}

/// Fails with every command whose output differs.
pub(crate) async fn compare() {
    let berth = Berth::start().await;
    let kubeconfig = berth.directory.path().join("kubeconfig");
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let server =
        Server::bind(address, berth.api.clone(), berth.credentials.clone(), Some(kubeconfig.clone()));
    let server = server.await.expect("the listener");
    let shutdown = CancellationToken::new();
    let serving = tokio::spawn(server.run(shutdown.clone()));
    let compared = tokio::task::spawn_blocking(move || {
        let real = testbed().join("admin.kubeconfig");
        play(&real, &kubeconfig)
    });
    let report = compared.await.expect("the comparison ends");
    shutdown.cancel();
    serving.await.expect("the server ends");
    assert!(report.is_empty(), "kubectl tells the servers apart:\n{report}");
}

fn play(real: &Path, berth: &Path) -> String {
    let mut report = String::new();
    let commands = COMMANDS.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    for command in commands {
        let (wanted, got) = (run(real, command), run(berth, command));
        if (wanted.succeeded, &wanted.output) != (got.succeeded, &got.output) {
            writeln!(report, "== kubectl {command}\n{}", lines(&wanted, &got)).expect("a string takes all");
        }
    }
    if let Some(path) = std::env::var_os("BERTH_DIFFERENCES_KUBECTL") {
        std::fs::write(path, &report).expect("the report can be written");
    }
    report
}

/// The lines that only one of the two has.
fn lines(wanted: &Printed, got: &Printed) -> String {
    let only = |mark: &str, these: &str, those: &str| -> String {
        let lacking = these.lines().filter(|line| !those.lines().any(|other| other == *line));
        lacking.fold(String::new(), |text, line| text + mark + line + "\n")
    };
    let mut text = only("- ", &wanted.output, &got.output) + &only("+ ", &got.output, &wanted.output);
    if wanted.succeeded != got.succeeded {
        text.push_str("the exit codes differ\n");
    }
    if text.is_empty() {
        text.push_str("the order of the lines differs\n");
    }
    text
}

/// Runs `kubectl COMMAND`; words may be quoted as in a shell.
#[expect(clippy::disallowed_methods, reason = "a test runs kubectl")]
fn run(kubeconfig: &Path, command: &str) -> Printed {
    let objects = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/server/differential/kubectl.yaml");
    let script = format!("kubectl {}", command.replace("OBJECTS", &objects.display().to_string()));
    let output = Command::new("timeout")
        .args(["30", "bash", "-c", &script])
        .env("KUBECONFIG", kubeconfig)
        .env("EDITOR", "sed -i s/postgres/postgres:17/")
        .env("KUBECACHEDIR", kubeconfig.with_extension("cache"))
        .stdin(Stdio::null())
        .output()
        .expect("kubectl runs");
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let text =
        NOISE.iter().fold(text.into_owned(), |text, (noise, to)| noise.replace_all(&text, *to).into_owned());
    let text: Vec<&str> = text.lines().map(str::trim_end).collect();
    Printed { succeeded: output.status.success(), output: text.join("\n") }
}
