//! What a node sees of a driver that is being introduced.

use std::os::unix::fs::PermissionsExt as _;

use crate::registration::registration_client::RegistrationClient;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use super::*;

struct Served {
    directory: tempfile::TempDir,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), Error>>,
}

impl Served {
    fn socket(&self) -> PathBuf {
        socket(self.directory.path(), "a.example")
    }

    async fn client(&self) -> RegistrationClient<Channel> {
        let endpoint = Endpoint::Unix(self.socket());
        loop {
            let mut client = RegistrationClient::new(crate::connect(&endpoint));
            if client.get_info(InfoRequest {}).await.is_ok() {
                return client;
            }
            tokio::task::yield_now().await;
        }
    }
}

fn serving(directory: tempfile::TempDir) -> Served {
    let shutdown = CancellationToken::new();
    let options = Options {
        directory: directory.path().to_owned(),
        driver: "a.example".to_owned(),
        endpoint: "/csi/csi.sock".into(),
    };
    let task = tokio::spawn(serve(options, shutdown.clone()));
    Served { directory, shutdown, task }
}

#[tokio::test]
async fn a_node_learns_name_endpoint_and_version_and_the_socket_goes_with_the_registrar() {
    let served = serving(tempfile::tempdir().unwrap());
    let info = served.client().await.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "a.example"));
    assert_eq!(
        (info.endpoint.as_str(), info.supported_versions.as_slice()),
        ("/csi/csi.sock", ["1.0.0".to_owned()].as_slice())
    );
    let mode = std::fs::metadata(served.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
    served.client().await.notify_registration_status(registered).await.unwrap();
    served.shutdown.cancel();
    let socket = served.socket();
    served.task.await.unwrap().unwrap();
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_refusal_ends_the_registrar_with_the_reason() {
    let served = serving(tempfile::tempdir().unwrap());
    let refused = RegistrationStatus { plugin_registered: false, error: "too old".to_owned() };
    served.client().await.notify_registration_status(refused).await.unwrap();
    let error = served.task.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the node refused the driver: too old");
}

#[tokio::test]
async fn an_abandoned_socket_is_replaced_and_a_file_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    drop(std::os::unix::net::UnixListener::bind(socket(directory.path(), "a.example")).unwrap());
    let served = serving(directory);
    served.client().await;
    served.shutdown.cancel();
    served.task.await.unwrap().unwrap();

    std::fs::write(socket(served.directory.path(), "a.example"), "mine").unwrap();
    let served = serving(served.directory);
    let path = served.socket();
    assert!(matches!(served.task.await.unwrap(), Err(Error::Bind(crate::BindError::NotASocket(_)))));
    assert_eq!(std::fs::read_to_string(path).unwrap(), "mine");
}

#[tokio::test]
async fn a_driver_that_does_not_answer_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let silent = directory.path().join("csi.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&silent).unwrap();
    let driver = crate::Client::connect(&Endpoint::Unix(silent));
    assert!(matches!(name_of(&driver, Duration::from_millis(20)).await, Err(Error::Name(_))));
}
