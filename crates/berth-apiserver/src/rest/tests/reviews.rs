//! TokenReview, SelfSubjectAccessReview and the tokens of service accounts.

use super::*;

const TOKEN: &str = "/api/v1/namespaces/default/serviceaccounts/builder/token";

#[tokio::test]
async fn a_service_account_gets_a_token_that_a_review_knows() {
    let api = Api::new().await;
    let account = json!({ "metadata": { "name": "builder" } });
    api.post("/api/v1/namespaces/default/serviceaccounts", &account).await;
    let request = json!({ "spec": { "audiences": ["vault"], "expirationSeconds": 900 } });
    let issued = api.post(TOKEN, &request).await;
    let token = issued["status"]["token"].as_str().unwrap();
    assert!(issued["status"]["expirationTimestamp"].is_string());
    let review = json!({ "spec": { "token": token, "audiences": ["vault", "other"] } });
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let answer = api.post(reviews, &review).await;
    assert_eq!(answer["status"]["authenticated"], true);
    assert_eq!(answer["status"]["user"]["username"], "system:serviceaccount:default:builder");
    assert_eq!(answer["status"]["audiences"], json!(["vault"]));
    let answer = api.post(reviews, &json!({ "spec": { "token": token } })).await;
    assert_ne!(answer["status"]["authenticated"], true);
    api.delete("/api/v1/namespaces/default/serviceaccounts/builder").await;
    let answer = api.post(reviews, &review).await;
    assert_ne!(answer["status"]["authenticated"], true);
}

#[tokio::test]
async fn tokens_that_would_end_too_soon_or_bind_to_nothing_are_refused() {
    let api = Api::new().await;
    let account = json!({ "metadata": { "name": "builder" } });
    api.post("/api/v1/namespaces/default/serviceaccounts", &account).await;
    let (code, _) = api.send(Method::POST, TOKEN, &json!({ "spec": { "expirationSeconds": 5 } })).await;
    assert_eq!(code, 422);
    let bound =
        json!({ "spec": { "boundObjectRef": { "kind": "Pod", "apiVersion": "v1", "name": "gone" } } });
    assert_eq!(api.send(Method::POST, TOKEN, &bound).await.0, 404);
}

#[tokio::test]
async fn whoever_is_known_may_do_everything() {
    let api = Api::new().await;
    let review = json!({ "spec": { "resourceAttributes": { "verb": "get", "resource": "pods" } } });
    let answer = api.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review).await;
    assert_eq!(answer["status"]["allowed"], true);
    let answer = api.post("/apis/authentication.k8s.io/v1/selfsubjectreviews", &json!({})).await;
    assert_eq!(answer["status"]["userInfo"]["username"], "system:apiserver");
}
