//! What probes and lifecycle hooks do to a running container: commands, HTTP requests, connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use berth_core::error_chain;
use berth_kube::Severity;
use berth_runtime::ContainerId;
use k8s_openapi::api::core::v1::{
    Container, GRPCAction, HTTPGetAction, LifecycleHandler, Pod, TCPSocketAction,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use super::{Pods, https};
use crate::plugins::expand;

/// How much of what a command prints goes into an event.
const LONGEST_OUTPUT: usize = 10 << 10;
/// How much of an answer is read to find its status.
const LONGEST_STATUS_LINE: usize = 4 << 10;

/// What probes call themselves.
const USER_AGENT: &str = "kube-probe/1.36";
/// The status of a service that is well, and all statuses.
const SERVING: i32 = 1;
const SERVING_STATUS: [&str; 4] = ["UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"];

/// What a server of gRPC is asked.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckRequest {
    #[prost(string, tag = "1")]
    service: String,
}

/// What a gRPC health service answers.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// A run of a container that something is done to.
pub(super) struct Target {
    pub(super) pods: Arc<Pods>,
    pub(super) container: Container,
    pub(super) id: ContainerId,
}

impl Target {
    /// Runs a command in the container; anything but exit code 0 is a failure, whose message is what it printed.
    pub(super) async fn exec(&self, command: &[String]) -> Result<(), String> {
        let fixed = |name: &str| {
            let all = self.container.env.iter().flatten();
            all.into_iter().rev().find(|variable| variable.name == name)?.value.as_deref()
        };
        let command = command.iter().map(|word| expand(word, fixed)).collect();
        let runtime = &self.pods.options.runtime;
        let (code, output) =
            runtime.run(&self.id, command, LONGEST_OUTPUT).await.map_err(|error| error.sentence())?;
        if code == 0 {
            return Ok(());
        }
        let output = String::from_utf8_lossy(&output);
        let output = output.trim_end();
        Err(if output.is_empty() { format!("the command exited with {code}") } else { output.to_owned() })
    }

    /// Sends a GET request; a status from 200 to 399 is a success.
    pub(super) async fn http_get(&self, get: &HTTPGetAction) -> Result<(), String> {
        let scheme = if is_https(get) { "https" } else { "http" };
        let answered = self.request(get, is_https(get), |_| true).await?;
        match answered.result {
            Ok(answer) => judge(&answered.address, &answer, scheme),
            Err(error) => Err(format!("Get \"{scheme}://{}\": {error}", answered.address)),
        }
    }

    /// The same for a hook: where a server that is to speak HTTPS speaks HTTP, it is asked so, as the kubelet does, but it
    /// does not get the credentials.
    async fn http_hook(&self, pod: &Pod, get: &HTTPGetAction) -> Result<(), String> {
        if !is_https(get) {
            return self.http_get(get).await;
        }
        let answered = self.request(get, true, |_| true).await?;
        let error = match answered.result {
            Ok(answer) => return judge(&answered.address, &answer, "https"),
            Err(error) if !https::is_no_tls(&error) => {
                return Err(format!("Get \"https://{}\": {error}", answered.address));
            }
            Err(error) => error,
        };
        let is_harmless = |name: &str| !name.eq_ignore_ascii_case("Authorization");
        let again = self.request(get, false, is_harmless).await?;
        let Ok(answer) = again.result else {
            return Err(format!("Get \"https://{}\": {error}", answered.address));
        };
        let message = format!(
            "request to HTTPS lifecycle hook {} got HTTP response, retry with HTTP succeeded",
            self.host(get.host.as_ref())
        );
        self.pods.emit(pod, &self.container.name, Severity::Warning, "LifecycleHTTPFallback", message);
        judge(&again.address, &answer, "http")
    }

    /// Sends a GET request with those headers of it that are wanted, and reads the first line of the answer.
    async fn request(
        &self,
        get: &HTTPGetAction,
        encrypted: bool,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Answered, String> {
        let (host, port) = (self.host(get.host.as_ref()), self.port(&get.port)?);
        let named = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let path = get.path.as_deref().unwrap_or_default();
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let mut headers = vec![
            ("Host".to_owned(), named.clone()),
            ("User-Agent".to_owned(), USER_AGENT.to_owned()),
            ("Accept".to_owned(), "*/*".to_owned()),
        ];
        for header in get.http_headers.iter().flatten().filter(|header| is_wanted(&header.name)) {
            headers.retain(|(name, _)| !name.eq_ignore_ascii_case(&header.name));
            headers.push((header.name.clone(), header.value.clone()));
        }
        headers.push(("Connection".to_owned(), "close".to_owned()));
        let lines: Vec<String> = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let request = format!("GET {path} HTTP/1.1\r\n{}\r\n", lines.concat());
        let ask = async {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            if encrypted {
                exchange(self.pods.https.connect(&host, stream).await?, &request).await
            } else {
                exchange(stream, &request).await
            }
        };
        Ok(Answered { address: format!("{named}{path}"), result: ask.await })
    }

    /// Asks a server of gRPC whether it, or one of its services, is well (`grpc.health.v1.Health`).
    pub(super) async fn grpc(&self, action: &GRPCAction) -> Result<(), String> {
        let port = u16::try_from(action.port).map_err(|_| format!("there is no port {}", action.port))?;
        let address = SocketAddr::new(self.pods.address(&self.id.pod_uid), port);
        let service = action.service.clone().unwrap_or_default();
        let failed = |error: &(dyn std::error::Error + 'static)| {
            format!("service unhealthy (error connecting to {address}: {})", error_chain(error))
        };
        let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| failed(&error))?;
        let endpoint = endpoint.user_agent(USER_AGENT).map_err(|error| failed(&error))?;
        let channel = endpoint.connect().await.map_err(|error| failed(&error))?;
        let mut client = Grpc::new(channel);
        client.ready().await.map_err(|error| failed(&error))?;
        let codec = ProstCodec::<HealthCheckRequest, HealthCheckResponse>::default();
        let path = PathAndQuery::from_static("/grpc.health.v1.Health/Check");
        let answer = client.unary(tonic::Request::new(HealthCheckRequest { service }), path, codec).await;
        match answer {
            Ok(answer) if answer.get_ref().status == SERVING => Ok(()),
            Ok(answer) => {
                let status = answer.get_ref().status;
                let name = SERVING_STATUS.get(usize::try_from(status).unwrap_or(usize::MAX)).unwrap_or(&"?");
                Err(format!("service unhealthy (responded with {name:?})"))
            }
            Err(status) if status.code() == tonic::Code::Unimplemented => {
                Err("server does not implement the grpc health protocol (grpc.health.v1.Health)".to_owned())
            }
            Err(status) => Err(format!("health rpc probe failed: {}", status.message())),
        }
    }

    fn host(&self, named: Option<&String>) -> String {
        let named = named.filter(|host| !host.is_empty());
        named.cloned().unwrap_or_else(|| self.pods.address(&self.id.pod_uid).to_string())
    }

    fn port(&self, port: &IntOrString) -> Result<u16, String> {
        let number = match port {
            IntOrString::Int(number) => Some(*number),
            IntOrString::String(name) => {
                let ports = self.container.ports.iter().flatten();
                let mut named = ports.filter(|port| port.name.as_ref() == Some(name));
                named.next().map(|port| port.container_port).or_else(|| name.parse().ok())
            }
        };
        let valid = number.and_then(|number| u16::try_from(number).ok()).filter(|number| *number > 0);
        valid.ok_or_else(|| format!("the container has no port {port:?}"))
    }

    /// Does what a lifecycle hook of the container says.
    pub(super) async fn hook(&self, pod: &Pod, hook: &LifecycleHandler) -> Result<(), String> {
        if let Some(exec) = &hook.exec {
            self.exec(exec.command.as_deref().unwrap_or_default()).await
        } else if let Some(get) = &hook.http_get {
            self.http_hook(pod, get).await
        } else if let Some(sleep) = &hook.sleep {
            tokio::time::sleep(Duration::from_secs(u64::try_from(sleep.seconds).unwrap_or(0))).await;
            Ok(())
        } else {
            Err("it names neither exec nor httpGet nor sleep".to_owned())
        }
    }

    /// Opens a connection and closes it again.
    pub(super) async fn connect(&self, socket: &TCPSocketAction) -> Result<(), String> {
        let (host, port) = (self.host(socket.host.as_ref()), self.port(&socket.port)?);
        let connected = TcpStream::connect((host.as_str(), port)).await;
        connected.map(drop).map_err(|error| format!("dial tcp {host}:{port}: {error}"))
    }
}

/// What became of a request.
struct Answered {
    /// Where it went, without the scheme.
    address: String,
    result: std::io::Result<Vec<u8>>,
}

fn is_https(get: &HTTPGetAction) -> bool {
    get.scheme.as_deref().is_some_and(|scheme| scheme.eq_ignore_ascii_case("HTTPS"))
}

/// Sends a request, and reads the beginning of the answer.
async fn exchange(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    request: &str,
) -> std::io::Result<Vec<u8>> {
    stream.write_all(request.as_bytes()).await?;
    stream.flush().await?;
    let mut answer = Vec::new();
    while !answer.contains(&b'\n') && answer.len() < LONGEST_STATUS_LINE {
        if stream.read_buf(&mut answer).await? == 0 {
            break;
        }
    }
    Ok(answer)
}

/// Whether an answer says that all is well.
fn judge(address: &str, answer: &[u8], scheme: &str) -> Result<(), String> {
    match status_code(answer) {
        Some(200..400) => Ok(()),
        Some(code) => Err(format!("HTTP probe failed with statuscode: {code}")),
        None => Err(format!("Get \"{scheme}://{address}\": the answer is not HTTP/1.1")),
    }
}

/// The status of an HTTP answer.
fn status_code(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|byte| *byte == b'\n').next()?;
    let line = std::str::from_utf8(line).ok()?;
    let mut words = line.split_ascii_whitespace();
    words.next().filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_an_answer_is_its_second_word() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\n", Some(200)),
            ("HTTP/1.0 503\r\nA: b\r\n", Some(503)),
            ("HTTP/1.1 nonsense\r\n", None),
            ("SSH-2.0-OpenSSH\r\n", None),
            ("", None),
        ] {
            assert_eq!(status_code(answer.as_bytes()), expected, "{answer:?}");
        }
    }
}
