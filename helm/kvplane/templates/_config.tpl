{{- define "kvplane.dir" -}}/etc/kvplane{{- end }}

{{/* Configuration keys that values of the chart set, and `config` may not. */}}
{{- define "kvplane.chartKeys" -}}
{{ list "listen" "memory_bytes" "metrics_listen" "metrics_token_file" "health_listen" "advertise" "drain_delay_ms" "drain_grace_ms" "ownership" "ownership_token" "store" "store_username" "store_password" "store_tls_ca" "store_tls_cert" "store_tls_key" "store_key_file" "tls_cert" "tls_key" "tls_client_ca" "tls_client_auth" "auth_tokens" "auth_jwks" "auth_jwt_issuer" "auth_jwt_audience" "auth_owners" "audit_log" | toYaml }}
{{- end }}

{{/* The address of the store, as the key `store` wants it. */}}
{{- define "kvplane.storeUrl" -}}
{{- if eq .Values.store.type "sqlite" -}}
sqlite:/var/lib/kvplane/store.sqlite
{{- else if eq .Values.store.type "external" -}}
{{ .Values.store.external.url }}
{{- else if eq .Values.store.type "builtin" -}}
redis://{{ include "kvplane.fullname" . }}-valkey.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}:{{ int .Values.store.builtin.port }}
{{- else -}}
none
{{- end -}}
{{- end }}

{{/* The keys that the chart sets, as YAML. What is secret, or differs by pod, is a variable (_service.tpl). */}}
{{- define "kvplane.chartConfig" -}}
{{- $dir := include "kvplane.dir" . -}}
listen: {{ printf "%s:%d" .Values.listenAddress (int .Values.ports.grpc) | quote }}
health_listen: {{ printf "%s:%d" .Values.listenAddress (int .Values.ports.health) | quote }}
{{- if .Values.metrics.enabled }}
metrics_listen: {{ printf "%s:%d" .Values.listenAddress (int .Values.ports.metrics) | quote }}
{{- if .Values.metrics.token.existingSecret }}
metrics_token_file: {{ $dir }}/metrics/token
{{- end }}
{{- end }}
drain_delay_ms: 0
drain_grace_ms: {{ mul 1000 (int .Values.drain.graceSeconds) }}
store: {{ include "kvplane.storeUrl" . | quote }}
{{- if include "kvplane.lease" . }}
ownership: {{ printf "lease:%s/%s" .Release.Namespace (include "kvplane.fullname" .) | quote }}
ownership_ca: {{ $dir }}/account/ca.crt
ownership_token: {{ $dir }}/account/token
{{- else if include "kvplane.sharesStore" . }}
ownership: {{ eq .Values.ownership.type "etcd" | ternary (printf "etcd:%s" .Values.ownership.etcdUrls) .Values.ownership.type | quote }}
{{- end }}
{{- with .Values.store.external }}
{{- if .caKey }}
store_tls_ca: {{ $dir }}/store/ca.crt
{{- end }}
{{- if .certKey }}
store_tls_cert: {{ $dir }}/store/tls.crt
store_tls_key: {{ $dir }}/store/tls.key
{{- end }}
{{- end }}
{{- with include "kvplane.sealSecret" . }}
store_key_file: {{ $dir }}/store-keys/keys
{{- end }}
{{- if .Values.tls.enabled }}
tls_cert: {{ $dir }}/tls/tls.crt
tls_key: {{ $dir }}/tls/tls.key
tls_client_auth: {{ .Values.tls.clientAuth | quote }}
{{- if ne .Values.tls.clientAuth "none" }}
tls_client_ca: {{ $dir }}/client-ca/{{ .Values.tls.clientCA.key }}
{{- end }}
{{- end }}
{{- with .Values.auth }}
{{- if .tokensKey }}
auth_tokens: {{ printf "%s/auth/%s" $dir .tokensKey | quote }}
{{- end }}
{{- if .jwksKey }}
auth_jwks: {{ printf "%s/auth/%s" $dir .jwksKey | quote }}
{{- end }}
{{- if .jwtIssuer }}
auth_jwt_issuer: {{ .jwtIssuer | quote }}
{{- end }}
{{- if .jwtAudience }}
auth_jwt_audience: {{ .jwtAudience | quote }}
{{- end }}
{{- if .ownersKey }}
auth_owners: {{ printf "%s/auth/%s" $dir .ownersKey | quote }}
{{- end }}
{{- end }}
{{- with .Values.peerServices }}
{{- if .enabled }}
peer_services: {{ include "kvplane.processes" $ | quote }}
{{- if .existingSecret }}
peer_services_token: {{ $dir }}/peers/token
{{- end }}
{{- if $.Values.tls.enabled }}
peer_services_ca: {{ $dir }}/tls/{{ $.Values.tls.caKey }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.auditLog }}
audit_log: {{ .Values.auditLog | quote }}
{{- end }}
{{- end }}

{{/* What kvplane.configMap needs of the service, except `root`. */}}
{{- define "kvplane.serviceConfig" -}}
{{ dict "component" "service" "suffix" "" "kind" "StatefulSet" "files" (dict "config.yaml" (include "kvplane.configFile" . | trim | printf "%s\n")) | toYaml }}
{{- end }}

{{/* The file that the service reads. toYaml alone writes great numbers so that YAML reads numbers again. */}}
{{- define "kvplane.configFile" -}}
{{ mergeOverwrite (deepCopy .Values.config) (include "kvplane.chartConfig" . | fromYaml) | toYaml }}
{{- end }}
