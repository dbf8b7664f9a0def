//! What is there from the start: the namespaces and priority classes of the system, and in every namespace its account and
//! authority.

use serde_json::{Value, json};

use super::error::Answer;
use super::request::Query;
use super::write::Tracking;
use super::{ApiServer, Failure, crd, object};
use crate::rules::priority::SYSTEM_CLASSES;
use crate::store::{Collection, Key};

const NAMESPACES: &[&str] = &["default", "kube-node-lease", "kube-public", "kube-system"];
const ACCOUNTS: &str = "serviceaccounts";
const ACCOUNT: &str = "default";
const MAPS: &str = "configmaps";
const AUTHORITY: &str = "kube-root-ca.crt";
/// Who emits events of the API server itself.
const COMPONENT: &str = "berth-apiserver";
/// The longest message that an event may have.
const MESSAGE: usize = 1024;

/// Whether one of the objects that every namespace has lies there.
pub(crate) fn has_furniture(collection: &Collection) -> bool {
    matches!(collection.as_str(), ACCOUNTS | MAPS)
}

/// Whether it is one of the objects that every namespace has.
pub(crate) fn is_furniture(key: &Key) -> bool {
    matches!((key.collection.as_str(), &*key.name), (ACCOUNTS, ACCOUNT) | (MAPS, AUTHORITY))
}

impl ApiServer {
    /// Makes the namespaces and priority classes of the system, and what every namespace needs, if they are missing; goes on with the
    /// deletion of definitions where it was.
    pub async fn bootstrap(&self) -> Answer<()> {
        for &name in NAMESPACES {
            self.ensure("", "namespaces", "", name, json!({})).await?;
        }
        for class in SYSTEM_CLASSES {
            let object = json!({ "value": class.value, "description": class.description });
            self.ensure("scheduling.k8s.io", "priorityclasses", "", class.name, object).await?;
        }
        let names: Vec<String> = self
            .inner
            .store
            .view(&Collection::from("namespaces"))
            .range(None, None)
            .map(|object| object.key.name.to_string())
            .collect();
        for name in names {
            self.create_namespace_defaults(&name).await?;
        }
        let definitions = self.inner.store.view(&crd::definitions());
        for definition in definitions.range(None, None) {
            // Whoever cannot delete, for want of space perhaps, can still serve.
            if let Err(failure) = self.clean_up(&definition.key.name).await {
                tracing::warn!(definition = &*definition.key.name, %failure, "cannot delete all objects");
            }
        }
        self.report_damage().await;
        Ok(())
    }

    /// Emits an event if records of the store are damaged.
    async fn report_damage(&self) {
        let Some(damage) = self.inner.store.damage() else { return };
        let message = damage.to_string();
        tracing::error!("{message}");
        let registry = self.registry();
        let Some(served) = registry.find("", "v1", "events") else { return };
        let (now, name) = (object::now(), format!("{COMPONENT}.{:x}", self.inner.store.revision()));
        let event = json!({
            "apiVersion": "v1", "kind": "Event",
            "metadata": { "name": name, "namespace": "default" },
            "involvedObject": { "apiVersion": "v1", "kind": "Namespace", "name": "kube-system" },
            "type": "Warning", "reason": "StoreDamaged",
            "message": message.chars().take(MESSAGE).collect::<String>(),
            "source": { "component": COMPONENT }, "reportingComponent": COMPONENT,
            "firstTimestamp": now, "lastTimestamp": now, "count": 1,
        });
        let call = self.internal(served.clone(), "default", &name);
        let written = match Query::default().write_options("CreateOptions") {
            Ok(options) => call.insert(event, &options, Tracking::Update).await.map(drop),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = written {
            tracing::warn!(%failure, "cannot emit an event about the damage");
        }
    }

    /// Gives a namespace its default account, and the certificate by which programs in it know this server.
    pub(crate) async fn create_namespace_defaults(&self, namespace: &str) -> Answer<()> {
        let stored = self.inner.store.get(&Key::new(Collection::from("namespaces"), "", namespace));
        let stored = stored.and_then(|object| serde_json::from_slice::<Value>(&object.bytes).ok());
        // What is on its way out needs nothing any more.
        if stored.is_none_or(|namespace| object::is_deleting(&namespace)) {
            return Ok(());
        }
        self.ensure("", ACCOUNTS, namespace, ACCOUNT, json!({})).await?;
        if let Some(credentials) = &self.inner.options.credentials {
            let data = json!({ "data": { "ca.crt": credentials.authority } });
            self.ensure("", MAPS, namespace, AUTHORITY, data).await?;
        }
        Ok(())
    }

    /// Makes an object if it is missing, and gives it its data back if that is another.
    async fn ensure(
        &self,
        group: &str,
        plural: &str,
        namespace: &str,
        name: &str,
        mut object: Value,
    ) -> Answer<()> {
        let registry = self.registry();
        let served = registry.find(group, "v1", plural).ok_or_else(Failure::no_such_path)?;
        let key = Key::new(served.collection.clone(), namespace, name);
        if self.inner.store.is_quarantined(&key) {
            return Ok(());
        }
        let have = self.inner.store.get(&key);
        let have = have.and_then(|object| serde_json::from_slice::<Value>(&object.bytes).ok());
        let data = object.get("data").cloned();
        if have.as_ref().is_some_and(|have| data.is_none() || have.get("data") == data.as_ref()) {
            return Ok(());
        }
        object["apiVersion"] = served.api_version.as_str().into();
        object["kind"] = (&*served.resource.kind).into();
        object["metadata"] = json!({ "name": name });
        if !namespace.is_empty() {
            object["metadata"]["namespace"] = namespace.into();
        }
        let call = self.internal(served.clone(), namespace, name);
        let options = Query::default().write_options("CreateOptions")?;
        let written = if have.is_some() {
            call.modify(&options, Tracking::Update, |old| {
                let mut new = old.clone();
                new["data"] = data.clone().unwrap_or_default();
                Ok(new)
            })
            .await
        } else {
            call.insert(object, &options, Tracking::Update).await
        };
        match written {
            Ok(_) => Ok(()),
            // Somebody else was faster, the namespace is on its way out, or somebody made the object immutable.
            Err(failure) if matches!(failure.code, 403 | 404 | 409 | 422) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}
