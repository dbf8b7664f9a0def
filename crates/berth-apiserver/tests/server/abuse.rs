//! Clients that behave badly: none may crash the server, hang it, or make it grow without bound.

mod bodies;
mod connections;
mod watches;

use std::time::Duration;

use serde_json::{Value, json};

use crate::http::{Connection, Reply};
use crate::served::Served;

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const MB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A server, its data and what is asked of it at the end.
struct Victim {
    served: Served,
    _directory: tempfile::TempDir,
}

impl Victim {
    fn start(history: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        Self { served: Served::start(directory.path(), history), _directory: directory }
    }

    async fn connect(&self) -> Connection {
        self.served.endpoint.connect().await.unwrap()
    }

    /// The server still runs, answers soon, and writes.
    async fn is_well(&mut self) {
        assert!(self.served.is_running());
        let asked = async {
            let mut connection = self.connect().await;
            assert_eq!(connection.get("/readyz").await.unwrap().status, 200);
            let reply = put_map(&mut connection, "well", "x").await;
            assert!(matches!(reply.status, 200 | 201), "{}", reply.json());
        };
        tokio::time::timeout(PATIENCE, asked).await.expect("the server answers");
    }
}

fn map(name: &str, text: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": name }, "data": { "text": text }
    })
}

/// Makes a config map, or gives it a new text.
async fn put_map(connection: &mut Connection, name: &str, text: &str) -> Reply {
    let reply = connection.json("POST", MAPS, &map(name, text)).await.unwrap();
    match reply.status {
        409 => connection.json("PUT", &format!("{MAPS}/{name}"), &map(name, text)).await.unwrap(),
        _ => reply,
    }
}
